"""Time of the training loop without a processor core: within any windows, and out of the parts of a step."""

from __future__ import annotations

import numpy as np

from gpulab.intervals import Intervals
from gpulab.run import CoreTimes, Float64, Int64


def within(readings: CoreTimes, counted: Int64, windows: Intervals) -> Float64:
    """How much of a count that grows falls into each window, [n, 2] in ns: evenly between two readings."""
    edges = np.interp(windows.ravel(), readings.t_ns, counted).reshape(-1, 2)
    return np.asarray(edges[:, 1] - edges[:, 0])


def waited_ns(readings: CoreTimes | None, windows: Intervals) -> Float64:
    """Of each window, ready to run and without a core; 0 where that is not known."""
    if readings is None or not is_known(readings) or not len(windows):
        return np.zeros(len(windows))
    return np.clip(within(readings, readings.wait_ns, windows), 0, windows[:, 1] - windows[:, 0])


def is_known(readings: CoreTimes) -> bool:
    """Whether the system tells how long a thread waits for a core."""
    return bool(len(readings)) and bool((readings.wait_ns >= 0).all())


def moved(totals: Int64, givers: list[int], taker: int, taken_ns: Float64) -> Int64:
    """The table [steps, parts] with so much of each step moved from the parts `givers` to the part `taker`.

    Each gives in proportion to what it has. Sums of steps stay as they are.
    """
    held = totals[:, givers].astype(np.float64)
    sums = held.sum(axis=1)
    share = np.minimum(taken_ns, sums) / np.maximum(sums, 1)
    given = np.minimum(np.floor(held * share[:, None]).astype(np.int64), totals[:, givers])
    after = totals.copy()
    after[:, givers] -= given
    after[:, taker] += given.sum(axis=1)
    return after
