"""How long blocks are, in which order they run and how many fit into the time there is. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpulab.analysis.steps import select
from gpulab.run import Run, StepFlag, Steps

WARMUP = 3  # steps; definitions.md, "Honest comparison" 1: and with workers those fed from the buffer
COUNTED = (5, 10)  # steps; definitions.md, "Honest comparison" 3
LEAST_BLOCK_S = 0.2  # a block of very short steps gets more of them, or one hiccup is most of it
MOST_STEPS = 200
PAIRS = (10, 30)
FEWEST_TURNS = 3  # whatever they take; definitions.md, "Honest comparison" 3


@dataclass(frozen=True, slots=True)
class Size:
    """Of a block, in steps: those dropped at its start, those that count."""

    warmup: int
    counted: int

    @property
    def total(self) -> int:
        return self.warmup + self.counted


def block_size(runs: Sequence[Run], counted: int | None = None, rounds: Sequence[int] = ()) -> Size:
    """The size that suits all arms, given one run of each. `counted`: as asked for.

    `rounds` are numbers of steps after which something recurs (accumulation): a block counts whole ones.

    Where workers load, batches come in rounds of as many as there are workers: a block counts whole rounds. A cell
    that ends by itself after fewer steps has shorter blocks, with at least as many counted as dropped.
    """
    step_s = max(_step_s(run) for run in runs)
    workers = [run.loader.num_workers for run in runs if run.loader is not None and run.loader.num_workers]
    warmup = max([WARMUP, *(_buffered(run) for run in runs)])
    if counted is None:
        counted = COUNTED[1] if step_s < 0.2 else COUNTED[0]
        counted = max(counted, min(MOST_STEPS, math.ceil(LEAST_BLOCK_S / step_s)))
        counted = _rounded_up(counted, math.lcm(*workers, *rounds))
    warmup = _rounded_up(warmup, math.lcm(*rounds))
    available = min((len(run.steps) for run in runs if run.outcome == "completed"), default=warmup + counted)
    if warmup + counted > available:
        warmup = min(warmup, available // 2)
        counted = max(1, available - warmup)
    return Size(warmup, counted)


def _rounded_up(count: int, whole: int) -> int:
    return math.ceil(count / whole) * whole


def pairs_within(budget_s: float, turn_s: float, asked: int | None = None) -> int:
    """How many turns fit; at least three, whatever they take. As many as asked for, whatever fits."""
    if asked is not None:
        return asked
    return max(FEWEST_TURNS, min(PAIRS[1], int(budget_s / max(turn_s, 1e-6))))


def turn_order(arm_count: int, random_order: random.Random) -> list[int]:
    """One turn: A twice, for A against A, and every other arm once, in random order."""
    order = [0, *range(arm_count)]
    random_order.shuffle(order)
    return order


def counted_rows(steps: Steps, size: Size) -> np.ndarray:
    """Rows of a block's steps that count: after its warm-up, whole, and nothing compiled in them."""
    flags = steps.flags
    fit = ((flags & StepFlag.PARTIAL) == 0) & ((flags & StepFlag.COMPILE) == 0)
    rows = np.flatnonzero(fit)
    return rows[rows >= size.warmup][: size.counted]


def _step_s(run: Run) -> float:
    rows = select(run).rows
    wall_ns = run.steps.time_ns[rows] if len(rows) else run.steps.time_ns
    return max(1e-6, float(np.mean(wall_ns)) / 1e9) if len(wall_ns) else 1.0


def _buffered(run: Run) -> int:
    loader = run.loader
    if loader is None or not loader.num_workers:
        return 0
    return loader.num_workers * (loader.prefetch_factor or 2) + 2
