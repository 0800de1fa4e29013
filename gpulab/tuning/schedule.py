"""How long blocks are, in which order they run and how many fit into the time there is. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from gpulab.analysis.steps import select
from gpulab.run import Run, StepFlag, Steps

WARMUP = 3  # steps; definitions.md, "Honest comparison" 1: and with workers those fed from the buffer
COUNTED = (5, 10)  # steps; definitions.md, "Honest comparison" 3
LEAST_BLOCK_S = 0.2  # a block of very short steps gets more of them, or one hiccup is most of it
MOST_STEPS = 200
PAIRS = (10, 30)
SHORTEST_FULL_RUN, FULL_RUN = 13, 40  # steps: enough for a profiled window, and as many as are wanted
STARTING_S = 2.0  # of a full run, beside its steps: the meters, the profiler, reading the trace
RESTORING_S = 0.02  # before a block
SCREENING_TURNS, SCREENED = 2, 3  # turns until the slower half drops out; how many stay to the end
FEWEST_TURNS = 3  # where no budget ends it sooner; definitions.md, "Honest comparison" 3


class Size(Struct, frozen=True):
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
    longest_s = max(step_s(run) for run in runs)
    workers = [run.loader.num_workers for run in runs if run.loader is not None and run.loader.num_workers]
    warmup = max([WARMUP, *(_buffered(run) for run in runs)])
    if counted is None:
        counted = _counted(longest_s)
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
    """How many turns are wanted: as many as fit, at least three; or as many as were asked for."""
    if asked is not None:
        return asked
    return max(FEWEST_TURNS, min(PAIRS[1], int(budget_s / max(turn_s, 1e-6))))


def turn_s(runs: Sequence[Run], size: Size) -> float:
    """What a turn takes as far as these runs tell, of which the first runs twice."""
    steps_s = [step_s(run) for run in runs]
    return size.total * (sum(steps_s) + steps_s[0])


class Expected(Struct, frozen=True):
    """What an experiment takes in all, before it begins."""

    least_s: float
    about_s: float


def expected(one_s: float, arms: int, pairs: int | None = None) -> Expected:
    """From `one_s`, the step of an earlier run. `arms` beside the cell as written, whose steps take about the same."""
    turn = (arms + 2) * ((WARMUP + _counted(one_s)) * one_s + RESTORING_S)
    shortest, full = (STARTING_S + steps * one_s for steps in (SHORTEST_FULL_RUN, FULL_RUN))
    turns = (FEWEST_TURNS, PAIRS[1]) if pairs is None else (pairs, pairs)
    return Expected((arms + 1) * shortest + turns[0] * turn, (arms + 1) * full + turns[1] * turn)


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


def _counted(one_s: float) -> int:
    counted = COUNTED[1] if one_s < 0.2 else COUNTED[0]
    return max(counted, min(MOST_STEPS, math.ceil(LEAST_BLOCK_S / one_s)))


def step_s(run: Run) -> float:
    """The mean of its steps that count."""
    rows = select(run).rows
    wall_ns = run.steps.time_ns[rows] if len(rows) else run.steps.time_ns
    return max(1e-6, float(np.mean(wall_ns)) / 1e9) if len(wall_ns) else 1.0


def _buffered(run: Run) -> int:
    loader = run.loader
    if loader is None or not loader.num_workers:
        return 0
    return loader.num_workers * (loader.prefetch_factor or 2) + 2
