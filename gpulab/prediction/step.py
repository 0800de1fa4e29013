"""A step as a prediction sees it: computing beside feeding, what a setting changes of either, and what it then takes.

definitions.md, "Feeding": with workers a step takes max(computing, loading) and a hand-off, without them the sum. On a
GPU computing is the replay of the traced window, on a CPU the time that is not waiting for data; there the workers
and the training share the cores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.analysis.facts import Facts
from gpulab.prediction.baseline import Baseline, Making, hand_off_measured, hand_off_us, making_of
from gpulab.prediction.calibration import HANDING, HANDING_ELSEWHERE, STARTING
from gpulab.prediction.replay import Changes, host_spans

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
        """Of the making: the share that waits, or all that it may be."""
        waited = self.making.waited_fraction if self.making is not None else None
        if waited is not None:
            return (waited,)
        return (0.0, 1.0) if self.workers and self.remade else (0.0,)

    def _handing(self) -> tuple[float, ...]:
        """Times what handing a batch over takes: as measured, or by a figure of another machine."""
        if not (self.workers and self.remade):
            return (1.0,)
        return HANDING if hand_off_measured(self.today) else HANDING_ELSEWHERE

    def _batches_us(self) -> tuple[float, ...]:
        """Making a batch: with a core of its own, and beside what took its core in this run."""
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
        return bool(c.device_factor is not None or c.host or len(c.free_waits) or len(c.unlaunched))

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
        assert today.replay is not None and today.run.timeline is not None  # the first raises Refused
        fed, more_us = Changes(), 0.0
        if self.remade:
            traced = today.facts.breakdown.median_us["data_wait"] if today.facts.breakdown is not None else 0.0
            loading = host_spans(today.run.timeline, [LOADER])
            fed = Changes(host=((loading, wait_us / traced),)) if traced else fed
            more_us = 0.0 if traced else wait_us
        return today.played_with_us(self.changes.and_also(fed)) + more_us


def plan_of(facts: Facts) -> Projection:
    """Nothing changed yet. Raises Refused."""
    today = Baseline.of(facts)
    return Projection(today, today.workers, making_of(today))
