"""The model of a step for predictions: computing and feeding, how settings change them, and the resulting time.

`Baseline` is the run's own step, `Projection` the step with other settings. Each constant names its source: "here" is
two cores of a shared x86-64 server, 2026, with PyTorch's CPU build; "ours" is a judgement without a measurement so far.
A deviation (names ending in SD) is that of the ratio's logarithm.

definitions.md, "Feeding": with workers a step takes max(computing, loading) plus a hand-off, without workers the sum.
On a GPU, computing is the replay of the traced window. On a CPU, it is the time that is not waiting for data, and
workers and training share the cores.
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
# CPU µs of the loop to receive a batch: per batch, and per tensor. Here, 1 to 10 tensors a batch.
RECEIVING_US = (500.0, 650.0)
# Tensors of a batch if their number is unknown. Ours.
TENSORS = 2
# Times `HAND_OFF_US`: a loop that waits longer for its workers waits for them to make a batch. Ours.
WAITS = 1.25
# Lowest and highest factor on the measured time to hand over a batch. Ours.
HANDING = (0.7, 1.3)
# The same if it was not measured in this run: on `RECEIVING_US`. Ours.
HANDING_ELSEWHERE = (0.4, 2.5)
# Share of a batch's time without a free core from which on other settings may lack a core, too. Ours.
CROWDED = 0.1
# Lowest and highest factor on the estimated time to start workers. Ours, from the two machines.
STARTING = (0.5, 2.0)
# Steps that count as independent: disturbances outlast a step, so more steps add little information. Ours.
INDEPENDENT = 10
# Busy share, and share of the step that remains without GPU work: above both, the trace hides the waits. Ours.
HIDDEN = 0.9
# Tasks of one replay, which is repeated often: 0.1 s here.
MOST_TASKS = 20_000


class NoPrediction(Exception):
    """The evidence does not support a prediction; the message is the reason in plain words, without a full stop."""


def is_on(value: str) -> bool:
    """Whether a switch is on, from its value as a knob shows it or as a user writes it."""
    return value.lower() in ("on", "true", "yes", "1")


def at_least(least: int, value: str) -> int:
    """A whole number of at least `least`. Raises ValueError for any other value."""
    number = int(value)
    if number < least:
        raise ValueError(value)
    return number


class Baseline(Struct, frozen=True, dict=True):
    """A run's own step, in µs: the figures that every prediction starts from."""

    facts: Facts
    step: Spread
    wait_us: float  # of the step, waiting for data
    batches: float  # fetched per step

    @classmethod
    def of(cls, facts: Facts) -> Baseline:
        """The baseline of a run. Raises NoPrediction if no step was measured."""
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
        """The GPU's work in the profiled steps. Raises NoPrediction if it is unknown or cannot show a gain.

        The trace hides what the host waits for if the GPU works all the time, but the window would be hardly shorter
        without its work.
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
        """The step without its wait for data."""
        return self.step.median - self.wait_us

    @cached_property
    def replay(self) -> Replay | None:
        """The replay of the traced window on its busiest GPU; None on a CPU. Raises NoPrediction without one."""
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
        """The replay without changes."""
        assert self.replay is not None
        return self.replay.play()

    def played_with_us(self, changes: Changes) -> float:
        """The median step, in µs, of the replay with these changes."""
        assert self.replay is not None
        return self.replay.play(changes).step_us

    @property
    def sampling_sd(self) -> float:
        """The error of the median step from the spread of the steps, as the deviation of its logarithm."""
        spread = np.log(max(self.step.p90, 1e-3) / max(self.step.p10, 1e-3)) / 2.563
        return float(1.253 * spread / np.sqrt(np.clip(self.step.count, 1, INDEPENDENT)))


class Making(Struct, frozen=True):
    """The making of one batch in its process, with a core of its own. `waited_fraction`: the share without CPU use;
    None: unknown. `crowded_us`: the measured time if it includes much waiting for a core; else None.
    """

    batch_us: float
    waited_fraction: float | None = None
    crowded_us: float | None = None


def making_of(today: Baseline) -> Making | None:
    """As timed in the process that makes the batch; else from the wait: all of it without workers, else their rate."""
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
        certain = bool(measured) or inside.collate_us > inside.batch_us / 2  # collation never waits
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
    """The hand-off as timed while the loop waited; else the short wait of a loop whose workers keep up; else None."""
    measured_us = today.facts.loading.hand_over_us if today.facts.loading is not None else None
    if measured_us is None and today.workers and today.wait_us < HAND_OFF_US * WAITS:
        return today.wait_us / today.batches
    return measured_us


def hand_off_us(today: Baseline) -> float:
    """The measured hand-off; else the estimated CPU time to receive a batch."""
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
    """The current step with other settings; each predictor adds its part, in any order.

    `starting_us` is the estimated time that starting workers in each epoch adds to a step, `first_us` what waiting for
    their first batch adds, `at_most_us` what both may add to some steps but not to a typical step. `saved_us` is time
    of the training thread per step that is removed (CPU device), `changes` those of the replay (GPU). `samples`:
    samples per step, after over before. `setup_s`: one-time cost before the steps; None: not predicted. `sd`: deviation
    of the ratio's logarithm. `reach`: further factors by which the result may be lower and higher; `only_sign` as in
    `Prediction`.
    """

    today: Baseline
    workers: int | None
    making: Making | None
    remade: bool = False  # the making or its processes were changed
    starting_us: float = 0.0
    first_us: float = 0.0
    at_most_us: float = 0.0
    saved_us: float = 0.0
    changes: Changes = field(default_factory=Changes)
    pure_factor: float = 1.0  # on the whole result, from a direct formula
    samples: float = 1.0
    sds: tuple[float, ...] = ()
    reach: tuple[float, float] = (1.0, 1.0)
    only_sign: bool = False
    memory_ratio: float | None = None
    setup_s: float | None = None
    basis: tuple[str, ...] = ()
    already: tuple[str, ...] = ()  # a sentence for each setting that the baseline has

    def as_it_is(self, why: str) -> Projection:
        """The projection with a setting that changes nothing, and why."""
        return replace(self, already=(*self.already, why), basis=(*self.basis, why))

    def doubted(self, sd: float, basis: str) -> Projection:
        """The projection with the deviation of one more formula, and its basis."""
        return replace(self, sds=(*self.sds, sd), basis=(*self.basis, basis))

    def reached(self, low: float, high: float) -> Projection:
        """The projection whose result may be `low` to `high` times as large."""
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
        """The projection with the whole result scaled by `times`, or by `low` to `high`, with the deviation `sd`.

        `samples`: factor on the samples of a step.
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
        computed_us = cache(self._computed_us)  # each call replays the window
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
        """The share of making a batch that waits; both extremes if it is unknown."""
        waited = self.making.waited_fraction if self.making is not None else None
        if waited is not None:
            return (waited,)
        return (0.0, 1.0) if self.workers and self.remade else (0.0,)

    def _handing(self) -> tuple[float, ...]:
        """Factors on the time to hand over a batch: for a measured time, or for a figure from another machine."""
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
        """The step, in µs, if it waits `wait_us` for its data."""
        today = self.today
        if not self._plays:
            return max(1e-3, today.compute_us - self.saved_us + wait_us)
        assert today.replay is not None and today.run.timeline is not None  # the first may raise NoPrediction
        fed, more_us = Changes(), 0.0
        if self.remade:
            traced = today.facts.breakdown.median_us["data_wait"] if today.facts.breakdown is not None else 0.0
            loading = host_spans(today.run.timeline, [LOADER])
            fed = Changes(host=((loading, wait_us / traced),)) if traced else fed
            more_us = 0.0 if traced else wait_us
        return today.played_with_us(self.changes.and_also(fed)) + more_us


def plan_of(facts: Facts) -> Projection:
    """The projection without any change. Raises NoPrediction."""
    today = Baseline.of(facts)
    return Projection(today, today.workers, making_of(today))
