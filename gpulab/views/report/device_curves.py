"""Panel: the device's curves on the time axis of the steps, percent on the left and memory on the right."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gpulab.analysis.facts import Facts
from gpulab.run import Float64, Series
from gpulab.views.drawing import SMALL_PT, Dashes, Key, frame, ink_lines, legend_beside
from gpulab.views.wording import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Paul Tol's "bright" and "muted" sets, with a line style each, so that no curve is known by colour alone.
_PERCENT_LINES: tuple[tuple[str, Dashes], ...] = (
    ("#332288", "-"),
    ("#CC3311", "-"),
    ("#117733", "--"),
    ("#AA4499", "-."),
    ("#0077BB", ":"),
    ("#999933", "--"),
)
_MEMORY_LINES: tuple[tuple[str, Dashes], ...] = (("#222222", "--"), ("#777777", ":"))
_MOST_POINTS = 350  # more are drawn as their mean with a band from the lowest to the highest
_GAP = 6  # times the usual distance between readings: longer is a hole, and no line is drawn over it


def shown(facts: Facts) -> tuple[list[Series], list[Series]]:
    """The curves that have a place in the panel: in percent, and memory."""
    series = [s for s in facts.run.samples.series if np.isfinite(s.value).any()]
    percent = [s for s in series if s.name.endswith(("_pct", "_fraction"))]
    memory = [s for s in series if s.name.endswith("_bytes")]
    return percent[: len(_PERCENT_LINES)], memory[: len(_MEMORY_LINES)]


def why_none(facts: Facts) -> str:
    """The reason why there is no curve, as far as the record tells it."""
    told = next((m.reason for m in facts.run.missing if m.key == "curves"), "")
    return f"No curve of the device was measured{': ' if told else ''}{told}."


def draw(axes: Axes, facts: Facts, seconds_per_unit: float) -> None:
    """The panel. Needs at least one curve to show."""
    percent, memory = shown(facts)
    frame(axes, "Device")
    for series, style in zip(percent, _PERCENT_LINES, strict=False):
        _curve(axes, series, 100.0 if series.name.endswith("_fraction") else 1.0, style, seconds_per_unit)
    if percent:
        axes.set_ylim(0, max(100.0, *(_highest(s) for s in percent)) * 1.06)
        axes.set_ylabel("%", fontsize=SMALL_PT)
    else:
        axes.set_yticks([])
    if memory:
        _memory(axes.twinx(), memory, seconds_per_unit)
    styles = [*zip(percent, _PERCENT_LINES, strict=False), *zip(memory, _MEMORY_LINES, strict=False)]
    keys = [Key(_label(series), colour, dashes=dashes) for series, (colour, dashes) in styles]
    legend_beside(axes, keys, offset_in=0.72 if memory else 0.18, spare_in=0.9)


def _highest(series: Series) -> float:
    return float(np.nanmax(series.value)) * (100 if series.name.endswith("_fraction") else 1)


def _memory(axes: Axes, memory: list[Series], seconds_per_unit: float) -> None:
    top = max(float(np.nanmax(s.value)) for s in memory)
    scale, unit = (2**30, "GiB") if top >= 0.1 * 2**30 else (2**20, "MiB")
    for series, style in zip(memory, _MEMORY_LINES, strict=False):
        _curve(axes, series, 1 / scale, style, seconds_per_unit)
    axes.set_ylim(0, top / scale * 1.2 or 1)
    axes.set_ylabel(unit, fontsize=SMALL_PT)
    axes.tick_params(labelsize=SMALL_PT, color="#999999")
    for side in ("top", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["right"].set_color("#999999")


def _curve(axes: Axes, series: Series, factor: float, style: tuple[str, Dashes], seconds_per_unit: float) -> None:
    t, low, mean, high = _at_most(series, _MOST_POINTS)
    t_units = t / 1e9 / seconds_per_unit
    colour, dashes = style
    if len(t) < len(series.t_ns):
        axes.fill_between(t_units, low * factor, high * factor, color=colour, alpha=0.15, linewidth=0)
    marker = "." if len(t) < 3 else ""
    axes.plot(t_units, mean * factor, color=colour, linestyle=dashes, linewidth=1.4, marker=marker)


def _label(series: Series) -> str:
    """What is read and by which instrument."""
    return "\n".join(ink_lines(f"{plain(series.label)} ({plain(series.source)})", 25, 2))


def _at_most(series: Series, most: int) -> tuple[Float64, Float64, Float64, Float64]:
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
