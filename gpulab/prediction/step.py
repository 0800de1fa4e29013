"""A step as a prediction sees it: computing beside feeding, what a setting changes of either, and what it then takes.

definitions.md, Formulas: with workers a step takes max(computing, loading) and a hand-off, without them the sum. On a
GPU computing is the replay of the traced window, on a CPU the time that is not waiting for data; there the workers
and the training share the cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from gpulab.analysis import spans
from gpulab.analysis.device_work import DeviceWork, device_work
from gpulab.analysis.facts import Facts
from gpulab.analysis.steps import Spread
from gpulab.intervals import intersect, measure
from gpulab.prediction.replay import Changes, Played, Replay, host_spans
from gpulab.run import Run

HAND_OFF_US = 2_000.0  # definitions.md, Feeding: from a worker's batch to the loop's having it
WAITS = 1.25  # times the hand-off: a loop that waits longer than this for workers waits for their making
Z_975 = 1.96
HIDDEN = 0.9  # busy, and of the step left without the GPU's work: then the trace does not show the wait for it
INDEPENDENT = 10  # steps: what disturbs a machine lasts longer than one, so that more of them tell hardly more
# A CPU's operator is as slow as its slowest thread, and one that has to share its core holds up the others: measured on
# two cores, two threads beside two workers that decode images, a step took 1.0 to 1.5 times what its work would take.
CROWDED = (1.0, 1.5)
CROWDED_FROM = 0.5  # of the making waited for something else: then the workers leave the cores free
# Two processes at once, each with a core of its own, measured: arithmetic takes as long as alone, passes over large
# arrays take 1.2 to 1.7 times as long, decoding images 1.1 times.
SHARED = (1.0, 1.25)
STARTING = (0.5, 2.0)  # times the estimate of what starting workers takes: machines differ
MOST_TASKS = 20_000  # that are played, over and over: a tenth of a second
LOADER = "enumerate(DataLoader)"


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
        step = facts.step_us or facts.traced_step_us
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
        """Processes that load data: as the loader says, else as a trace names its iterator; None: unknown."""
        if self.run.loader is not None:
            return self.run.loader.num_workers
        names = self.run.timeline.names if self.run.timeline is not None else ()
        return 0 if any("_SingleProcessDataLoaderIter" in name for name in names) else None

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


@dataclass(frozen=True)
class Plan:
    """What settings make of today's step; each predictor adds its part, in any order.

    `starting_us` is an estimate of what starting workers with each epoch adds to a step, `first_us` what waiting for
    their first batch adds, `at_most_us` what either may add to some steps and not to a typical one.
    `threads`: as many as compute from now on, on a CPU; None: as before. `saved_us` is time of the training thread per
    step that falls away (CPU device), `changes` what a replay plays (GPU). `samples`: of a step, after over before.
    `sd`: of the ratio's logarithm. `reach`: factors by which the result may be lower and higher beside that;
    `only_sign` as of a Prediction.
    """

    today: Today
    workers: int | None
    making: Making | None
    remade: bool = False  # the making, or the processes that do it, were changed
    starting_us: float = 0.0
    first_us: float = 0.0
    at_most_us: float = 0.0
    threads: int | None = None
    saved_us: float = 0.0
    changes: Changes = field(default_factory=Changes)
    pure_factor: float = 1.0  # on the whole result: where a formula gives it directly
    samples: float = 1.0
    sds: tuple[float, ...] = ()
    reach: tuple[float, float] = (1.0, 1.0)
    only_sign: bool = False
    memory_ratio: float | None = None
    basis: tuple[str, ...] = ()

    def doubted(self, sd: float, basis: str) -> Plan:
        """With the doubt of one more formula, and from what it is."""
        return replace(self, sds=(*self.sds, sd), basis=(*self.basis, basis))

    def reached(self, low: float, high: float) -> Plan:
        """The result may be that many times as large."""
        return replace(self, reach=(self.reach[0] * low, self.reach[1] * high))

    def ratio(self) -> tuple[float, float, float]:
        """Time per sample after over before: likely, lowest, highest."""
        found = [self._step_us(assumed) for assumed in _assumptions(self)]
        before = self.today.played_us if self._plays else self.today.step.median
        scale = self.pure_factor / self.samples / before
        middle = float(np.median(found)) * scale
        sd = float(np.sqrt(self.today.sampling_sd**2 + sum(s**2 for s in self.sds)))
        edges = (
            min(found) + (STARTING[0] - 1) * self.starting_us,
            max(found) + (STARTING[1] - 1) * self.starting_us + self.at_most_us,
        )
        low, high = (float(edge) * scale * by for edge, by in zip(edges, self.reach, strict=True))
        return middle, min(low, middle) * float(np.exp(-Z_975 * sd)), max(high, middle) * float(np.exp(Z_975 * sd))

    @property
    def _plays(self) -> bool:
        return self.today.on_gpu and (self.remade or self._changes_device)

    @property
    def _changes_device(self) -> bool:
        c = self.changes
        return bool(c.device_factor is not None or c.host or len(c.free_waits) or len(c.unlaunched))

    def _step_us(self, assumed: Assumed) -> float:
        today = self.today
        if not self.remade:
            return self._computed_us(today.wait_us, assumed.slower)
        making = self.making
        assert making is not None
        batch_us = (making.batch_us + assumed.more_us) * today.batches
        if not self.workers:
            return self._computed_us(batch_us, assumed.slower)
        hand_off = hand_off_us(today) * today.batches
        computed = self._computed_us(hand_off, assumed.slower)
        cpu_us = assumed.shared * batch_us * (1 - assumed.waited_fraction) + hand_off
        cores = today.run.environment.usable_cores
        least = [computed, (batch_us * assumed.waited_fraction + cpu_us) / self.workers]
        if cores:
            taken = 0.0 if today.on_gpu else assumed.training_cores * (computed - hand_off)
            least += [(cpu_us + taken) / cores, cpu_us / min(self.workers, cores)]
        return max(least) + self.first_us + self.starting_us

    def _computed_us(self, wait_us: float, slower: float) -> float:
        """A step that waits that long for its data, and computes so many times as long on a CPU."""
        today = self.today
        if not self._plays:
            return max(1e-3, slower * (today.compute_us - self.saved_us) + wait_us)
        assert today.replay is not None and today.run.timeline is not None
        fed, more_us = Changes(), 0.0
        if self.remade:
            traced = _wait_in_trace_us(today)
            loading = host_spans(today.run.timeline, [LOADER])
            fed = Changes(host=((loading, wait_us / traced),)) if traced else fed
            more_us = 0.0 if traced else wait_us
        return float(np.median(today.replay.play(self.changes.and_also(fed)).step_ns)) / 1e3 + more_us


def _wait_in_trace_us(today: Today) -> float:
    return today.facts.breakdown.median_us["data_wait"] if today.facts.breakdown is not None else 0.0


def plan_of(facts: Facts) -> Plan:
    """Nothing changed yet. Raises Refused."""
    today = Today.of(facts)
    return Plan(today, today.workers, _making(today))


def hand_off_us(today: Today) -> float:
    """As the run shows it: measured where the loop waited, at most the wait of a loop whose workers keep up."""
    known = today.facts.loading.hand_over_us if today.facts.loading is not None else None
    if known is not None:
        return known
    if today.workers and today.wait_us < HAND_OFF_US * WAITS:
        return today.wait_us / today.batches
    return HAND_OFF_US


def _making(today: Today) -> Making | None:
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
        return Making(made_us, min(1.0, waited_us / made_us) if told and made_us else None)
    if today.workers == 0:
        return Making(today.wait_us / today.batches) if today.facts.data_wait_us is not None else None
    if today.workers and today.wait_us > HAND_OFF_US * WAITS * today.batches:
        return Making(today.workers * today.step.median / today.batches)
    return None


@dataclass(frozen=True, slots=True)
class Assumed:
    """What is not known, as one of the values that it may have: the share of making that waits, the cores that the
    training takes, how many times as long as today it computes, what making a batch takes on top, and how many times
    as long the making's work takes beside other processes.
    """

    waited_fraction: float
    training_cores: float
    slower: float = 1.0
    more_us: float = 0.0
    shared: float = 1.0


def _assumptions(plan: Plan) -> Iterator[Assumed]:
    making = plan.making
    known = making.waited_fraction if making is not None else None
    waited = (0.0, 1.0) if known is None else (known,)
    more = sorted(set(making.more_us)) if making is not None and plan.remade else [0.0]
    alone = not plan.workers or not plan.remade
    if alone:
        waited = waited[:1]
    shared = (1.0,) if alone or plan.today.workers else SHARED
    if plan.today.on_gpu:
        return iter([Assumed(w, 1.0, more_us=m, shared=s) for w in waited for m in more for s in shared])
    return iter(
        Assumed(w, 1.0 if alone else taken, slower, m, s)
        for w in waited
        for taken, slower in _computing(plan, w)
        for m in more
        for s in shared
    )


def _computing(plan: Plan, waited_fraction: float) -> Iterator[tuple[float, float]]:
    """The cores that computing takes, and how many times as long it takes as today."""
    today = plan.today
    taken, cores = training_cores(today, waited_fraction), today.run.environment.usable_cores
    before = today.run.environment.compute_threads
    if plan.threads is not None and before is not None and plan.threads < before:
        fewer = min(taken, plan.threads)
        return iter([(fewer, 1.0), (fewer, max(1.0, taken / plan.threads))])
    threads = before or 1
    crowded = plan.remade and plan.workers and cores and threads > 1 and threads + plan.workers > cores
    if crowded and waited_fraction < CROWDED_FROM:
        return iter([(taken, by) for by in CROWDED])
    return iter([(taken, 1.0)])


def training_cores(today: Today, waited_fraction: float) -> float:
    """How many cores the training itself keeps busy while it computes on a CPU, from the load while it ran; at least 1.

    What the making of data takes beside it is taken off: all of today's waiting without workers.
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
    making_us = today.wait_us * (1 - waited_fraction) if today.workers == 0 else 0.0
    return float(np.clip((load * today.step.median - making_us) / today.compute_us, 1.0, cores))


def training_spans_us(today: Today, mask: spans.Mask) -> float:
    """The time per profiled step that these rows cover on the training threads."""
    timeline = today.run.timeline
    steps = today.facts.breakdown.steps if today.facts.breakdown is not None else ()
    if timeline is None or not steps:
        return 0.0
    windows = np.array([(s.start_ns, s.end_ns) for s in steps], dtype=np.int64)
    return measure(intersect(windows, spans.covered(timeline, mask))) / 1e3 / len(steps)


__all__ = [
    "HAND_OFF_US",
    "Making",
    "Plan",
    "Refused",
    "Today",
    "at_least",
    "hand_off_us",
    "is_on",
    "plan_of",
    "training_cores",
]
