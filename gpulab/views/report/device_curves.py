"""Panel: the device's curves on the time axis of the steps, percent on the left and memory on the right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpulab.analysis.facts import Facts
from gpulab.run import Series
from gpulab.views import curves
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


def shown(facts: Facts) -> tuple[list[Series], list[Series]]:
    """The curves that have a place in the panel: in percent, and memory."""
    series = [s for s in facts.run.samples.series if curves.has_readings(s)]
    percent = [s for s in series if s.name.endswith(("_pct", "_fraction"))]
    memory = [s for s in series if s.name.endswith("_bytes")]
    return percent[: len(_PERCENT_LINES)], memory[: len(_MEMORY_LINES)]


def why_none(facts: Facts) -> str:
    """The reason why there is no curve, as far as the record tells it."""
    reason = next((m.reason for m in facts.run.missing if m.key == "curves"), "")
    return f"No curve of the device was measured{': ' if reason else ''}{reason}."


def draw(axes: Axes, facts: Facts, seconds_per_unit: float) -> None:
    """The panel. Needs at least one curve to show."""
    percent, memory = shown(facts)
    frame(axes, "Device")
    for series, style in zip(percent, _PERCENT_LINES, strict=False):
        curves.plot(axes, series, curves.percent_scale(series), *style, seconds_per_unit=seconds_per_unit)
    if percent:
        axes.set_ylim(0, max(100.0, *(curves.highest([s]) * curves.percent_scale(s) for s in percent)) * 1.06)
        axes.set_ylabel("%", fontsize=SMALL_PT)
    else:
        axes.set_yticks([])
    if memory:
        _memory(axes.twinx(), memory, seconds_per_unit)
    styles = [*zip(percent, _PERCENT_LINES, strict=False), *zip(memory, _MEMORY_LINES, strict=False)]
    keys = [Key(_label(series), colour, dashes=dashes) for series, (colour, dashes) in styles]
    legend_beside(axes, keys, offset_in=0.72 if memory else 0.18, spare_in=0.9)


def _memory(axes: Axes, memory: list[Series], seconds_per_unit: float) -> None:
    scale, unit = curves.memory_scale(memory)
    for series, style in zip(memory, _MEMORY_LINES, strict=False):
        curves.plot(axes, series, scale, *style, seconds_per_unit=seconds_per_unit)
    axes.set_ylim(0, curves.highest(memory) * scale * 1.2 or 1)
    axes.set_ylabel(unit, fontsize=SMALL_PT)
    axes.tick_params(labelsize=SMALL_PT, color="#999999")
    for side in ("top", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["right"].set_color("#999999")


def _label(series: Series) -> str:
    """What is read and by which instrument."""
    return "\n".join(ink_lines(f"{plain(series.label)} ({plain(series.source)})", 25, 2))
