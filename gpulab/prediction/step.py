"""A step as a prediction sees it: computing beside feeding, what a setting changes of either, and what it then takes.

definitions.md, "Feeding": with workers a step takes max(computing, loading) and a hand-off, without them the sum. On a
GPU computing is the replay of the traced window, on a CPU the time that is not waiting for data; there the workers
and the training share the cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from gpulab.analysis.facts import Facts
from gpulab.prediction.baseline import Making, Today, hand_off_us, making_of, receiving_us, sending_us
from gpulab.prediction.replay import Changes, host_spans
from gpulab.prediction.unknowns import Assumed, assumptions

Z_975 = 1.96
STARTING = (0.5, 2.0)  # times the estimate of what starting workers takes: machines differ
SHORT_EPOCH = 32  # steps: the short runs of a comparison hold the start of one
LOADER = "enumerate(DataLoader)"


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
        found = [self._step_us(assumed) for assumed in self._assumptions()]
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

    def _assumptions(self) -> Iterator[Assumed]:
        return assumptions(self.today, self.making, self.workers, remade=self.remade, threads=self.threads)

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
        hand_off = assumed.handing * hand_off_us(today) * today.batches
        received = assumed.handing * receiving_us(today) * today.batches
        computed = self._computed_us(hand_off, assumed.slower)
        sent = assumed.handing * sending_us(today) * today.batches
        cpu_us = assumed.shared * batch_us * (1 - assumed.waited_fraction) + sent
        cores = today.run.environment.usable_cores
        making_us = batch_us * assumed.waited_fraction + cpu_us
        least = [computed, making_us / self.workers]
        if cores:
            taken = received + (0.0 if today.on_gpu else assumed.training_cores * (computed - hand_off))
            least += [(cpu_us + taken) / cores, cpu_us / min(self.workers, cores)]
        by_rounds_us = self._by_rounds_us(self.workers, making_us, computed)
        return max(max(least) + self.first_us, by_rounds_us) + self.starting_us

    def _by_rounds_us(self, workers: int, making_us: float, computed_us: float) -> float:
        """In short epochs: workers that all begin with the epoch hand over a batch each at once, the last round fewer.

        Of n batches the last of ceil(n / workers) rounds is followed by the steps of its own batches.
        """
        loader = self.today.run.loader
        if loader is None or not loader.length or loader.length >= SHORT_EPOCH * self.today.batches:
            return 0.0
        rounds = int(np.ceil(loader.length / workers))
        last = loader.length - (rounds - 1) * workers
        return (rounds * making_us + last * computed_us) / loader.length

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
    return Plan(today, today.workers, making_of(today))


__all__ = ["LOADER", "SHORT_EPOCH", "STARTING", "Plan", "plan_of"]
