"""A step as a prediction sees it: computing beside feeding, what a setting changes of either, and what it then takes.

`Baseline` is the run's own step, `Projection` what settings make of it. A constant says where it comes from: "here" is
two cores of a shared x86-64 server, 2026, with PyTorch's build for the CPU; "ours" is a judgement that no measurement
carries yet. A deviation (`_SD`) is that of the ratio's logarithm.

definitions.md, "Feeding": with workers a step takes max(computing, loading) and a hand-off, without them the sum. On a
GPU computing is the replay of the traced window, on a CPU the time that is not waiting for data; there the workers
and the training share the cores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from itertools import product

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.analysis.facts import Facts
from gpulab.analysis.kernels import DeviceWork, device_work
from gpulab.analysis.steps import Spread
from gpulab.intervals import intersect, measure
from gpulab.prediction.replay import Changes, Played, Replay, host_spans
from gpulab.run import Run
from gpulab.timeline.labels import Mask, labels

# µs from a batch's end in the worker to its arrival in the loop, if not measured: definitions.md, "Feeding".
HAND_OFF_US = 2_000.0
# CPU µs of the loop to receive a batch: for the batch, and for each of its tensors. Here, 1 to 10 tensors a batch.
RECEIVING_US = (500.0, 650.0)
# Tensors of a batch, where their number is not known. Ours.
TENSORS = 2
# Times `HAND_OFF_US`: a loop that waits longer than this for its workers waits for their making. Ours.
WAITS = 1.25
# Factors on the measured time to hand a batch over, least and most. Ours.
HANDING = (0.7, 1.3)
# The same where it was not measured here: `RECEIVING_US`. Ours.
HANDING_ELSEWHERE = (0.4, 2.5)
# Share of a batch's time without a free core, from which on it may lack one again. Ours.
CROWDED = 0.1
# Factors on the estimated time to start workers, least and most. Ours, from the two machines.
STARTING = (0.5, 2.0)
# Steps that count as independent: disturbances last longer than one step, so more steps add little. Ours.
INDEPENDENT = 10
# Busy share, and share of the step that remains without GPU work, above which the trace hides the waits. Ours.
HIDDEN = 0.9
# Tasks that are played, over and over: a tenth of a second here.
MOST_TASKS = 20_000


class NoPrediction(Exception):
    """The evidence does not support a prediction; the reason in plain words, without a full stop."""


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
        """Raises NoPrediction where no step was measured."""
        step = facts.typical_step_us
        if step is None or step.median <= 0:
            raise NoPrediction("no complete step was measured")
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
        """What the GPU did in the profiled steps. Raises NoPrediction where that is not known, or shows no gain.

        If the GPU works all the time, but the window would be hardly shorter without its work, the trace does not show
        what the host waits for.
        """
        work = self.facts.work or device_work(self.run.timeline, self.facts.breakdown)
        if self.replay is None or work is None:
            raise NoPrediction("there is no trace of the GPU's kernels")
        without_us = self.played_with_us(Changes(device_factor=np.zeros(len(work.timeline))))
        if self.played.busy_fraction > HIDDEN and without_us > HIDDEN * self.played.step_us:
            raise NoPrediction("the GPU is always busy, but the trace does not show where the program waits for it")
        return work

    @property
    def compute_us(self) -> float:
        """The step without waiting for data."""
        return self.step.median - self.wait_us

    @cached_property
    def replay(self) -> Replay | None:
        """Of the traced window on its busiest GPU; None on a CPU. Raises NoPrediction where there is none to play."""
        if not self.on_gpu:
            return None
        account = self.facts.breakdown
        if account is None or account.device_index is None:
            raise NoPrediction("there is no trace of the GPU's work to replay")
        try:
            return Replay(self.run, account.device_index, MOST_TASKS)
        except ValueError as e:
            raise NoPrediction(str(e)) from None

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
    """Timed in the process that makes it; else by the wait: all of it without workers, else their rate."""
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


def measured_hand_off_us(today: Baseline) -> float | None:
    """As timed while the loop waited; else the short wait of a loop whose workers keep up; else None."""
    measured_us = today.facts.loading.hand_over_us if today.facts.loading is not None else None
    if measured_us is None and today.workers and today.wait_us < HAND_OFF_US * WAITS:
        return today.wait_us / today.batches
    return measured_us


def hand_off_us(today: Baseline) -> float:
    """The same; else an estimate of the CPU time that receiving a batch takes."""
    measured_us, loader = measured_hand_off_us(today), today.run.loader
    if measured_us is not None:
        return measured_us
    tensors = loader.batch_tensors if loader is not None else None
    return RECEIVING_US[0] + RECEIVING_US[1] * (TENSORS if tensors is None else tensors)


def training_spans_us(today: Baseline, mask: Mask) -> float:
    """The time per profiled step that these rows cover on the training threads."""
    timeline = today.run.timeline
    account = today.facts.breakdown
    if timeline is None or account is None or not account.steps:
        return 0.0
    return measure(intersect(account.host_windows, labels(timeline).times(mask))) / 1e3 / len(account.steps)


Z_975 = 1.96
LOADER = "enumerate(DataLoader)"


class Projection(Struct, frozen=True):
    """What settings make of today's step; each predictor adds its part, in any order.

    `starting_us` is an estimate of what starting workers with each epoch adds to a step, `first_us` what waiting for
    their first batch adds, `at_most_us` what either may add to some steps and not to a typical one. `saved_us` is time
    of the training thread per step that falls away (CPU device), `changes` what a replay plays (GPU). `samples`: of a
    step, after over before. `setup_s`: taken once, before the steps; None: not predicted.
    `sd`: of the ratio's logarithm. `reach`: factors by which the result may be lower and higher beside that;
    `only_sign` as of a Prediction.
    """

    today: Baseline
    workers: int | None
    making: Making | None
    remade: bool = False  # the making, or the processes that do it, were changed
    starting_us: float = 0.0
    first_us: float = 0.0
    at_most_us: float = 0.0
    saved_us: float = 0.0
    changes: Changes = field(default_factory=Changes)
    pure_factor: float = 1.0  # on the whole result: where a formula gives it directly
    samples: float = 1.0
    sds: tuple[float, ...] = ()
    reach: tuple[float, float] = (1.0, 1.0)
    only_sign: bool = False
    memory_ratio: float | None = None
    setup_s: float | None = None
    basis: tuple[str, ...] = ()
    already: tuple[str, ...] = ()  # of settings that the baseline has: a sentence each

    def as_it_is(self, why: str) -> Projection:
        """One of the settings changes nothing."""
        return replace(self, already=(*self.already, why), basis=(*self.basis, why))

    def doubted(self, sd: float, basis: str) -> Projection:
        """With the doubt of one more formula, and from what it is."""
        return replace(self, sds=(*self.sds, sd), basis=(*self.basis, basis))

    def reached(self, low: float, high: float) -> Projection:
        """The result may be that many times as large."""
        return replace(self, reach=(self.reach[0] * low, self.reach[1] * high))

    def scaled(
        self,
        times: float,
        low: float,
        high: float,
        sd: float,
        basis: str,
        *,
        samples: float = 1.0,
        only_sign: bool = True,
    ) -> Projection:
        """The whole result that many times as large, or from `low` to `high` times, beside the doubt `sd`.

        `samples`: how many times as many a step has.
        """
        changed = replace(
            self,
            pure_factor=self.pure_factor * times,
            samples=self.samples * samples,
            only_sign=self.only_sign or only_sign,
        )
        return changed.doubted(sd, basis).reached(low / times, high / times)

    def ratio(self) -> tuple[float, float, float]:
        """Time per sample after over before: likely, lowest, highest."""
        likely = list(product(self._waited_fractions(), (1.0,), self._batches_us()))
        ways = list(product(self._waited_fractions(), self._handing(), self._batches_us()))
        computed_us = cache(self._computed_us)  # each time the window is played again
        step_us = {way: self._step_us(*way, computed_us) for way in dict.fromkeys((*likely, *ways))}
        likely_us, steps_us = [step_us[way] for way in likely], [step_us[way] for way in ways]
        before = self.today.played.step_us if self._plays else self.today.step.median
        scale = self.pure_factor / self.samples / before
        middle = float(np.median(likely_us)) * scale
        sd = float(np.sqrt(self.today.sampling_sd**2 + sum(s**2 for s in self.sds)))
        edges = (
            min(steps_us) + (STARTING[0] - 1) * self.starting_us,
            max(steps_us) + (STARTING[1] - 1) * self.starting_us + self.at_most_us,
        )
        low, high = (float(edge) * scale * by for edge, by in zip(edges, self.reach, strict=True))
        return middle, min(low, middle) * float(np.exp(-Z_975 * sd)), max(high, middle) * float(np.exp(Z_975 * sd))

    def _waited_fractions(self) -> tuple[float, ...]:
        """The share of making a batch that waits; both extremes where it is not known."""
        waited = self.making.waited_fraction if self.making is not None else None
        if waited is not None:
            return (waited,)
        return (0.0, 1.0) if self.workers and self.remade else (0.0,)

    def _handing(self) -> tuple[float, ...]:
        """Factors on the time to hand a batch over: as measured, or by a figure of another machine."""
        if not (self.workers and self.remade):
            return (1.0,)
        return HANDING_ELSEWHERE if measured_hand_off_us(self.today) is None else HANDING

    def _batches_us(self) -> tuple[float, ...]:
        """The time to make a batch: with a core of its own, and with the core contention of this run."""
        making = self.making
        if making is None or not self.remade:
            return (0.0,)
        crowded_us = making.crowded_us
        return (making.batch_us,) if crowded_us is None else (making.batch_us, crowded_us)

    @property
    def _plays(self) -> bool:
        return self.today.on_gpu and (self.remade or self._changes_device)

    @property
    def _changes_device(self) -> bool:
        c = self.changes
        return bool(c.device_factor is not None or c.host or len(c.free_waits))

    def _step_us(
        self, waited_fraction: float, handing: float, batch_us: float, computed_us: Callable[[float], float]
    ) -> float:
        today, making = self.today, self.making
        if not self.remade:
            return computed_us(today.wait_us)
        assert making is not None
        making_us = batch_us * today.batches
        if not self.workers:
            return computed_us(making_us)
        hand_off = handing * hand_off_us(today) * today.batches
        computed = computed_us(hand_off)
        cpu_us = making_us * (1 - waited_fraction)
        cores = today.run.environment.usable_cores
        least = [computed, making_us / self.workers]
        if cores:
            training_us = 0.0 if today.on_gpu else computed - hand_off
            least += [(cpu_us + training_us) / cores, cpu_us / min(self.workers, cores)]
        return max(least) + self.first_us + self.starting_us

    def _computed_us(self, wait_us: float) -> float:
        """A step that waits that long for its data."""
        today = self.today
        if not self._plays:
            return max(1e-3, today.compute_us - self.saved_us + wait_us)
        assert today.replay is not None and today.run.timeline is not None  # the first raises NoPrediction
        fed, more_us = Changes(), 0.0
        if self.remade:
            traced = today.facts.breakdown.median_us["data_wait"] if today.facts.breakdown is not None else 0.0
            loading = host_spans(today.run.timeline, [LOADER])
            fed = Changes(host=((loading, wait_us / traced),)) if traced else fed
            more_us = 0.0 if traced else wait_us
        return today.played_with_us(self.changes.and_also(fed)) + more_us


def plan_of(facts: Facts) -> Projection:
    """Nothing changed yet. Raises NoPrediction."""
    today = Baseline.of(facts)
    return Projection(today, today.workers, making_of(today))
