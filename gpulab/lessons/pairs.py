"""The speed of an answer: it and what it replaces run in turn, and a check is decided by the interval alone.

A solution that does nothing and looks fast once, by chance, is undecided here or wrong: never right.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gpulab.formatting import factor
from gpulab.lessons.check import Checked, right, undecided, wrong
from gpulab.tuning.compare.statistics import paired

PAIRS = 7
BUDGET_S = 25.0
FEWEST_PAIRS = 3  # however long one takes: fewer have no interval worth the name

Measure = Callable[[], float]  # runs some work once; seconds, of a step or of the whole


@dataclass(frozen=True, slots=True)
class Speed:
    """How many times as fast the second is as the first, and its 95 % interval; seconds of each are medians."""

    times: float
    interval: tuple[float, float]
    before_s: float
    after_s: float
    count: int

    @property
    def words(self) -> str:
        """ "2.1 times as fast (95 % interval 2.0 to 2.3)"."""
        low, high = self.interval
        return f"{factor(self.times)} times as fast (95 % interval {factor(low)} to {factor(high)})"


def seconds_of(work: Callable[[], object]) -> Measure:
    """A measure of a function without arguments: how long one call takes. Waits for the GPU where there is one."""

    def measured() -> float:
        _wait_for_gpu()
        began = time.perf_counter()
        work()
        _wait_for_gpu()
        return time.perf_counter() - began

    return measured


def time_pairs(before: Measure, after: Measure, *, pairs: int = PAIRS, budget_s: float = BUDGET_S) -> Speed:
    """Both once for warming up, then in turn, each pair in random order, until `pairs` or `budget_s` are reached.

    What either raises passes. definitions.md, "Honest comparison" 3 and 4.
    """
    deadline = time.monotonic() + budget_s
    before(), after()
    shuffle = random.Random(0)
    seconds: list[tuple[float, float]] = []
    while len(seconds) < pairs and (len(seconds) < FEWEST_PAIRS or time.monotonic() < deadline):
        gc.collect()
        if shuffle.random() < 0.5:
            first = before()
            seconds.append((first, after()))
        else:
            second = after()
            seconds.append((before(), second))
    a, b = np.array(seconds).T
    estimate = paired(a / b)
    assert estimate is not None and estimate.interval is not None  # there are FEWEST_PAIRS
    return Speed(estimate.ratio, estimate.interval, float(np.median(a)), float(np.median(b)), estimate.count)


def judge_speed(speed: Speed, wanted: float, *, good: str = "", hint: str = "") -> Checked:
    """Right where the whole interval reaches `wanted` times, wrong where none of it does; `hint`: what to try then."""
    low, high = speed.interval
    if low >= wanted:
        return right(f"{speed.words}. {good}".strip())
    if high < wanted:
        return wrong(f"{speed.words}, and {factor(wanted)} is wanted. {hint}".strip())
    return undecided(
        f"{speed.words}, and {factor(wanted)} is wanted: the measurement leaves open whether it is reached. If other "
        "programs are running, run this cell again when they have ended."
    )


def _wait_for_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
