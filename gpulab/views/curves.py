"""The curve of a meter in a panel: in the panel's unit, with few enough points, and broken where the readings pause."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gpulab.run import Float64, Series
from gpulab.views.drawing import Dashes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS = 350  # more are drawn as their mean with a band from the lowest to the highest
_GAP = 6  # times the usual distance between readings: longer is a hole, and no line is drawn over it


def has_readings(series: Series) -> bool:
    """Whether there is anything to draw."""
    return bool(np.isfinite(series.value).any())


def highest(series: Sequence[Series]) -> float:
    """The highest reading of all, as they were read."""
    return max((float(np.nanmax(s.value)) for s in series), default=0.0)


def percent_scale(series: Series) -> float:
    """What its readings are multiplied by to be percent."""
    return 100.0 if series.name.endswith("_fraction") else 1.0


def memory_scale(series: Sequence[Series]) -> tuple[float, str]:
    """What readings in bytes are multiplied by for an axis that holds them all, and its unit."""
    return (2.0**-30, "GiB") if highest(series) >= 0.1 * 2**30 else (2.0**-20, "MiB")


def plot(
    axes: Axes, series: Series, scale: float, colour: str, dashes: Dashes, *, seconds_per_unit: float = 1.0
) -> None:
    """One line, its readings multiplied by `scale`."""
    t_ns, low, mean, high = at_most(series, _MOST_POINTS)
    t_units = t_ns / 1e9 / seconds_per_unit
    if len(t_ns) < len(series.t_ns):
        axes.fill_between(t_units, low * scale, high * scale, color=colour, alpha=0.15, linewidth=0)
    marker = "." if len(t_ns) < 3 else ""
    axes.plot(t_units, mean * scale, color=colour, linestyle=dashes, linewidth=1.4, marker=marker)


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
