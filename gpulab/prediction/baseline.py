"""A run's own step as every prediction starts from it: computing, waiting for data, and what makes the data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gpulab.analysis.facts import Facts
from gpulab.analysis.gpu.device_work import DeviceWork, device_work
from gpulab.analysis.steps import Spread
from gpulab.intervals import covers, intersect, measure
from gpulab.prediction.replay import Changes, Played, Replay
from gpulab.run import Category, Run
from gpulab.timeline import spans
from gpulab.timeline.launches import CallTree

HAND_OFF_US = 2_000.0  # definitions.md, "Feeding": from a worker's batch to the loop's having it
# Handing a batch of n tensors over is work for both sides, measured on two cores with batches of 1 to 10 tensors: for
# the worker beside its making the next one, and for the loop. `TENSORS` where their number is not known.
SENDING_US, RECEIVING_US = (1_300.0, 500.0), (500.0, 650.0)  # of a batch, and of each tensor
TENSORS = 2
WAITS = 1.25  # times the hand-off: a loop that waits longer than this for workers waits for their making
HIDDEN = 0.9  # busy, and of the step left without the GPU's work: then the trace does not show the wait for it
INDEPENDENT = 10  # steps: what disturbs a machine lasts longer than one, so that more of them tell hardly more
MOST_TASKS = 20_000  # that are played, over and over: a tenth of a second


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


@dataclass(frozen=True)
class Today:
    """A run's own step, in µs: the figures that every prediction starts from."""

    facts: Facts
    step: Spread
    wait_us: float  # of it waiting for data
    batches: float  # fetched in a step

    @classmethod
    def of(cls, facts: Facts) -> Today:
        """Raises Refused where no step was measured."""
        step = facts.typical_step_us
        if step is None or step.median <= 0:
            raise Refused("no complete step was measured")
        wait = facts.data_wait_us.median if facts.data_wait_us is not None else 0.0
        counts = facts.run.steps.batch_count
        return cls(facts, step, min(wait, step.median), max(1.0, float(np.median(counts))) if len(counts) else 1.0)

    @property
    def run(self) -> Run:
        """The record."""
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
        found = device_work(self.run.timeline, self.facts.breakdown)
        if self.replay is None or found is None:
            raise Refused("there is no trace of the GPU's kernels")
        idle = np.zeros(len(found.timeline))
        busy = self.played.busy_fraction
        without = float(np.median(self.replay.play(Changes(device_factor=idle)).step_ns)) / 1e3
        if busy > HIDDEN and without > HIDDEN * self.played_us:
            raise Refused("the GPU works all the time, but the trace does not show where the program waits for it")
        return found

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
            raise Refused("there is no trace of the GPU's work to play again")
        try:
            return Replay(self.run, account.device_index, MOST_TASKS)
        except ValueError as e:
            raise Refused(str(e)) from None

    @cached_property
    def played(self) -> Played:
        """The window as it was measured."""
        assert self.replay is not None
        return self.replay.play()

    @cached_property
    def loading_calls(self) -> float:
        """Calls of PyTorch that make one batch in the training process; 0 where it does not, or no trace shows it."""
        timeline, account = self.run.timeline, self.facts.breakdown
        if timeline is None or account is None or self.workers != 0:
            return 0.0
        operators = np.flatnonzero(spans.in_category(timeline, Category.CPU_OP) & spans.on_training_thread(timeline))
        tree = CallTree.of(timeline, operators)
        inside = covers(intersect(spans.loading_times(timeline), account.host_covered), timeline.start_ns[tree.rows])
        is_loader = spans.named(timeline, spans.is_loader)[tree.rows]
        above = np.where(tree.parent >= 0, is_loader[np.maximum(tree.parent, 0)], True)
        return float((inside & above & ~is_loader).sum()) / max(1, len(account.steps)) / self.batches

    @property
    def played_us(self) -> float:
        """Its median step."""
        return float(np.median(self.played.step_ns)) / 1e3

    @property
    def sampling_sd(self) -> float:
        """How far the median step may be off by the spread of the steps, as the deviation of its logarithm."""
        spread = np.log(max(self.step.p90, 1e-3) / max(self.step.p10, 1e-3)) / 2.563
        return float(1.253 * spread / np.sqrt(np.clip(self.step.count, 1, INDEPENDENT)))


@dataclass(frozen=True, slots=True)
class Making:
    """One batch in the process that makes it. `waited_fraction`: of it no CPU is used; None: not known.

    `more_us` is what may come on top, at least and at most: where it is not known better.
    """

    batch_us: float
    waited_fraction: float | None = None
    more_us: tuple[float, float] = (0.0, 0.0)


def making_of(today: Today) -> Making | None:
    """Timed where it happens, else what the wait tells: all of it without workers, their pace where the loop waits."""
    inside = today.facts.loading
    if inside is not None:
        parts = (
            (inside.read_us, inside.read_waited_fraction),
            (inside.transform_us, inside.transform_waited_fraction),
        )
        told = [(us, waited) for us, waited in parts if waited is not None]
        made_us = inside.batch_us * (1 - (inside.core_wait_fraction or 0.0))  # with a core of its own
        waited_us = sum(us * waited for us, waited in told)
        known = bool(told) or inside.collate_us > inside.batch_us / 2  # putting together waits for nothing
        return Making(made_us, min(1.0, waited_us / made_us) if known and made_us else None)
    if today.workers == 0:
        return Making(today.wait_us / today.batches) if today.facts.data_wait_us is not None else None
    if today.workers and today.wait_us > HAND_OFF_US * WAITS * today.batches:
        return Making(today.workers * today.step.median / today.batches)
    return None


def sending_us(today: Today) -> float:
    """What a worker's processor does to hand a batch over."""
    return _handing_us(today, SENDING_US)


def receiving_us(today: Today) -> float:
    """What the training loop's does to have it."""
    return _handing_us(today, RECEIVING_US)


def _handing_us(today: Today, of: tuple[float, float]) -> float:
    loader = today.run.loader
    known = loader.batch_tensors if loader is not None else None
    return of[0] + of[1] * (TENSORS if known is None else known)


def hand_off_us(today: Today) -> float:
    """As the run shows it: measured where the loop waited, at most the wait of a loop whose workers keep up."""
    known = today.facts.loading.hand_over_us if today.facts.loading is not None else None
    if known is not None:
        return known
    if today.workers and today.wait_us < HAND_OFF_US * WAITS:
        return today.wait_us / today.batches
    return receiving_us(today)


def training_cores(today: Today, waited_fraction: float) -> float:
    """How many cores the training itself keeps busy while it computes on a CPU, from the load while it ran; at least 1.

    What the making of data takes beside it is taken off: all of today's waiting without workers, else a step's batches.
    """
    cores, curve = today.run.environment.usable_cores, today.run.samples.get("cpu_pct")
    rows = today.facts.selection.rows
    if not cores or curve is None or not len(rows) or today.compute_us <= 0:
        return 1.0
    first, last = int(today.run.steps.start_ns[rows[0]]), int(today.run.steps.end_ns[rows[-1]])
    inside = (curve.t_ns >= first) & (curve.t_ns <= last)
    if inside.sum() < 3:
        return 1.0
    load = float(np.median(curve.value[inside])) / 100 * cores
    making_us = 0.0
    if today.workers == 0:
        making_us = today.wait_us * (1 - waited_fraction)
    elif today.workers and (making := making_of(today)) is not None:
        making_us = (making.batch_us * (1 - waited_fraction) + sending_us(today)) * today.batches
    return float(np.clip((load * today.step.median - making_us) / today.compute_us, 1.0, cores))


def training_spans_us(today: Today, mask: spans.Mask) -> float:
    """The time per profiled step that these rows cover on the training threads."""
    timeline = today.run.timeline
    account = today.facts.breakdown
    if timeline is None or account is None or not account.steps:
        return 0.0
    return measure(intersect(account.host_windows, spans.covered(timeline, mask))) / 1e3 / len(account.steps)


__all__ = [
    "HAND_OFF_US",
    "Making",
    "Refused",
    "Today",
    "at_least",
    "hand_off_us",
    "is_on",
    "making_of",
    "receiving_us",
    "sending_us",
    "training_cores",
    "training_spans_us",
]
