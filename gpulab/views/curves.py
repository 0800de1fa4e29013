"""The curve of a meter in a panel: in the panel's unit, with few enough points, and broken where the readings pause."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from gpulab.run import Float64, Samples, Series

_GAP = 6  # times the usual distance between readings: longer is a hole, and no line is drawn over it


def has_readings(series: Series) -> bool:
    """Whether there is anything to draw."""
    return bool(np.isfinite(series.value).any())


def of_device(samples: Samples) -> tuple[list[Series], list[Series]]:
    """The curves with readings: in percent, and memory."""
    series = [s for s in samples.series if has_readings(s)]
    percent = [s for s in series if s.name.endswith(("_pct", "_fraction"))]
    return percent, [s for s in series if s.name.endswith("_bytes")]


def highest(series: Sequence[Series]) -> float:
    """The highest reading of all, as they were read."""
    return max((float(np.nanmax(s.value)) for s in series), default=0.0)


def percent_scale(series: Series) -> float:
    """What its readings are multiplied by to be percent."""
    return 100.0 if series.name.endswith("_fraction") else 1.0


def memory_scale(series: Sequence[Series]) -> tuple[float, str]:
    """What readings in bytes are multiplied by for an axis that holds them all, and its unit."""
    return (2.0**-30, "GiB") if highest(series) >= 0.1 * 2**30 else (2.0**-20, "MiB")


def at_most(series: Series, most: int) -> tuple[Float64, Float64, Float64, Float64]:
    """Time, lowest, mean and highest value over at most about `most` groups of neighbouring readings.

    A NaN stands where the readings pause, so that a meter that died draws no straight line.
    """
    t, value = series.t_ns.astype(np.float64), series.value.astype(np.float64)
    distance = np.diff(t)
    holes = np.flatnonzero(distance > _GAP * np.median(distance)) + 1 if len(t) > 2 else np.empty(0, np.int64)
    edges = np.unique(np.concatenate([[0], holes, [len(t)]]))
    per_group = -(-len(t) // most)
    first = np.concatenate([np.arange(a, b, per_group) for a, b in pairwise(edges)])
    count = np.diff(np.append(first, len(t)))
    columns = (
        np.add.reduceat(t, first) / count,
        np.minimum.reduceat(value, first),
        np.add.reduceat(value, first) / count,
        np.maximum.reduceat(value, first),
    )
    at = np.searchsorted(first, holes)
    broken = [np.insert(column, at, column[at] if column is columns[0] else np.nan) for column in columns]
    return broken[0], broken[1], broken[2], broken[3]
