"""A run's own step as every prediction starts from it: computing, waiting for data, and what makes the data."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from msgspec import Struct

from gpulab.analysis.facts import Facts
from gpulab.analysis.kernels import DeviceWork, device_work
from gpulab.analysis.steps import Spread
from gpulab.intervals import intersect, measure
from gpulab.prediction.calibration import (
    CROWDED,
    HAND_OFF_US,
    HIDDEN,
    INDEPENDENT,
    MOST_TASKS,
    RECEIVING_US,
    TENSORS,
    WAITS,
)
from gpulab.prediction.replay import Changes, Played, Replay
from gpulab.run import Run
from gpulab.timeline import spans


class Refused(Exception):
    """The evidence does not carry a prediction; the reason in plain words, without a full stop."""


def is_on(value: str) -> bool:
    """A switch's value, as a knob shows it or as a user writes it."""
    return value.lower() in ("on", "true", "yes", "1")


def at_least(least: int, value: str) -> int:
    """A whole number. Raises ValueError for what is none, or less."""
    number = int(value)
    if number < least:
        raise ValueError(value)
    return number


class Baseline(Struct, frozen=True, dict=True):
    """A run's own step, in µs: the figures that every prediction starts from."""

    facts: Facts
    step: Spread
    wait_us: float  # of it waiting for data
    batches: float  # fetched in a step

    @classmethod
    def of(cls, facts: Facts) -> Baseline:
        """Raises Refused where no step was measured."""
        step = facts.typical_step_us
        if step is None or step.median <= 0:
            raise Refused("no complete step was measured")
        wait = facts.data_wait_us.median if facts.data_wait_us is not None else 0.0
        counts = facts.run.steps.batch_count
        return cls(facts, step, min(wait, step.median), max(1.0, float(np.median(counts))) if len(counts) else 1.0)

    @property
    def run(self) -> Run:
        """The run that the prediction starts from."""
        return self.facts.run

    @property
    def on_gpu(self) -> bool:
        """Whether the device whose time is accounted is a GPU."""
        return self.run.device.kind == "cuda"

    @property
    def workers(self) -> int | None:
        """Processes that load data; None: not recorded."""
        return self.facts.worker_count

    @cached_property
    def work(self) -> DeviceWork:
        """What the GPU did in the profiled steps. Raises Refused where that is not known, or says nothing of a gain.

        A window in which the GPU works all the time, and which would be hardly shorter if it did not, hides what the
        host waits for.
        """
        work = self.facts.work or device_work(self.run.timeline, self.facts.breakdown)
        if self.replay is None or work is None:
            raise Refused("there is no trace of the GPU's kernels")
        without_us = self.played_with_us(Changes(device_factor=np.zeros(len(work.timeline))))
        if self.played.busy_fraction > HIDDEN and without_us > HIDDEN * self.played.step_us:
            raise Refused("the GPU is always busy, but the trace does not show where the program waits for it")
        return work

    @property
    def compute_us(self) -> float:
        """The step without waiting for data."""
        return self.step.median - self.wait_us

    @cached_property
    def replay(self) -> Replay | None:
        """Of the traced window on its busiest GPU; None on a CPU. Raises Refused where there is none to play."""
        if not self.on_gpu:
            return None
        account = self.facts.breakdown
        if account is None or account.device_index is None:
            raise Refused("there is no trace of the GPU's work to replay")
        try:
            return Replay(self.run, account.device_index, MOST_TASKS)
        except ValueError as e:
            raise Refused(str(e)) from None

    @cached_property
    def played(self) -> Played:
        """The window as it was measured."""
        assert self.replay is not None
        return self.replay.play()

    def played_with_us(self, changes: Changes) -> float:
        """The median step of the window with these changes."""
        assert self.replay is not None
        return self.replay.play(changes).step_us

    @property
    def sampling_sd(self) -> float:
        """How far the median step may be off by the spread of the steps, as the deviation of its logarithm."""
        spread = np.log(max(self.step.p90, 1e-3) / max(self.step.p10, 1e-3)) / 2.563
        return float(1.253 * spread / np.sqrt(np.clip(self.step.count, 1, INDEPENDENT)))


class Making(Struct, frozen=True):
    """One batch in the process that makes it, with a core of its own. `waited_fraction`: of it no CPU is used; None:
    not known. `crowded_us`: as it was measured, where that held much waiting for a core; else None.
    """

    batch_us: float
    waited_fraction: float | None = None
    crowded_us: float | None = None


def making_of(today: Baseline) -> Making | None:
    """Timed where it happens, else what the wait tells: all of it without workers, their pace where the loop waits."""
    inside = today.facts.loading
    if inside is not None:
        parts = (
            (inside.read_us, inside.read_waited_fraction),
            (inside.transform_us, inside.transform_waited_fraction),
        )
        measured = [(us, waited) for us, waited in parts if waited is not None]
        crowded = inside.core_wait_fraction or 0.0
        batch_us = inside.batch_us * (1 - crowded)
        waited_us = sum(us * waited for us, waited in measured)
        certain = bool(measured) or inside.collate_us > inside.batch_us / 2  # putting together waits for nothing
        return Making(
            batch_us,
            min(1.0, waited_us / batch_us) if certain and batch_us else None,
            inside.batch_us if crowded >= CROWDED else None,
        )
    if today.workers == 0:
        return Making(today.wait_us / today.batches) if today.facts.data_wait_us is not None else None
    if today.workers and today.wait_us > HAND_OFF_US * WAITS * today.batches:
        return Making(today.workers * today.step.median / today.batches)
    return None


def hand_off_measured(today: Baseline) -> bool:
    """Whether the run shows what handing a batch over takes."""
    inside = today.facts.loading
    measured = inside is not None and inside.hand_over_us is not None
    return measured or bool(today.workers and today.wait_us < HAND_OFF_US * WAITS)


def hand_off_us(today: Baseline) -> float:
    """As the run shows it: measured where the loop waited, at most the wait of a loop whose workers keep up."""
    measured_us = today.facts.loading.hand_over_us if today.facts.loading is not None else None
    if measured_us is not None:
        return measured_us
    if today.workers and today.wait_us < HAND_OFF_US * WAITS:
        return today.wait_us / today.batches
    # what the training loop's processor does to have a batch
    loader = today.run.loader
    tensors = loader.batch_tensors if loader is not None else None
    return RECEIVING_US[0] + RECEIVING_US[1] * (TENSORS if tensors is None else tensors)


def training_spans_us(today: Baseline, mask: spans.Mask) -> float:
    """The time per profiled step that these rows cover on the training threads."""
    timeline = today.run.timeline
    account = today.facts.breakdown
    if timeline is None or account is None or not account.steps:
        return 0.0
    return measure(intersect(account.host_windows, spans.covered(timeline, mask))) / 1e3 / len(account.steps)
