"""Figures for papers and slides: `run.plot()`, `comparison.plot()`. matplotlib is imported only when they are called.

Fonts, sizes and lines follow the user's rcParams; the parts of a step have the colours of the report.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpulab.analysis.facts import facts
from gpulab.errors import UsageError
from gpulab.formatting import speed_figures
from gpulab.run import Run
from gpulab.tuning.bench import pair_speeds, rows_of
from gpulab.tuning.record import Comparison
from gpulab.views import run_figure, wording
from gpulab.views.bars import Segment, axis_of, factor_ticks
from gpulab.views.bench import factor_ranges
from gpulab.views.comparison_sections import name
from gpulab.views.run_figure import MEMORY, PERCENT, Chart

_MOST_CURVES = 6
_BAR_PX = 22  # on the scale of the charts' heights
_PANEL_IN = 1.5  # least height of a figure per panel
_TITLE, _LABEL, _SETTING = 72, 34, 24  # characters of a line
_ROW_IN, _AXIS_IN = 0.45, 1.2  # a comparison's height per setting, and around all settings


class NotebookFigure(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        self.savefig(png := io.BytesIO(), format="png")
        return png.getvalue()


def plot_run(run: Run) -> Figure:
    """A typical step's parts, the steps over time and the device's curves, as far as they were measured.

    Raises UsageError if none was measured.
    """
    run_facts = facts(run)
    parts = run_figure.segments(run_facts)
    device = (run_figure.device_curves(run_facts, kinds, _MOST_CURVES) for kinds in (PERCENT, MEMORY))
    charts = [chart for chart in (run_figure.steps_over_time(run_facts), *device) if chart is not None]
    if not parts and not charts:
        raise UsageError(f"There is nothing to plot of {run.name}: no steps, no curves. Mark steps with gpulab.step().")
    heights = [_BAR_PX] * bool(parts) + [chart.height_px * (1 + chart.stacked) for chart in charts]
    wide_in, high_in = rcParams["figure.figsize"]
    figure = NotebookFigure(figsize=(wide_in, max(high_in, _PANEL_IN * len(heights))), layout="constrained")
    panels = iter(figure.subplots(len(heights), height_ratios=heights, squeeze=False)[:, 0])
    if parts:
        _draw_parts(next(panels), parts, run_figure.title(run_facts))
    for axes, chart in zip(panels, charts, strict=True):
        _draw_chart(axes, chart, {part.label for part in parts})
        axes.tick_params(labelbottom=chart is charts[-1])
    if charts:
        axes.set_xlabel(f"time in s, {charts[0].below}")
    return figure


def _draw_parts(axes: Axes, parts: Sequence[Segment], title: str) -> None:
    left = 0.0
    for part in parts:
        hatch = "//" if part.hatch else ""
        axes.barh(0, part.share, 1, left, color=part.colour, hatch=hatch, label=f"{part.label}: {part.words}")
        left += part.share
    axes.set(xlim=(0, 1), ylim=(-0.5, 0.5), xticks=[], yticks=[])
    _legend(axes, title)


def _draw_chart(axes: Axes, chart: Chart, explained: Container[str]) -> None:
    """Draw a chart of the page; `explained` has the labels that another legend already shows."""
    base = np.zeros(1)
    for line in chart.lines:
        label = "_" if line.label in explained else _lines(line.label, _LABEL)
        if chart.stacked:
            high = line.y[:-1]
            axes.bar(line.x[:-1], high, np.diff(line.x), base, align="edge", color=line.colour, label=label)
            base = base + high
        else:
            axes.plot(line.x, line.y, label=label if len(chart.lines) > 1 else "_")
    axes.set(xlim=(0, chart.x_end), ylim=(chart.low, chart.top), ylabel=_lines(chart.unit, 3))
    _legend(axes, chart.title)


def plot_comparisons(comparisons: Sequence[Comparison]) -> Figure:
    """The speedup of each setting over the first, with the 95 % interval, the noise and the pairs of blocks.

    Raises UsageError if no setting could be compared.
    """
    first, *rows = rows_of(comparisons)
    ranges = factor_ranges([first, *rows])[1:]
    pairs = [pair_speeds(first, row) for row in rows]
    if not any(estimate.middle for estimate in ranges):
        raise UsageError("There is nothing to plot: no setting could be compared with the first. Its .text() says why.")
    usual = [float(x) for some in pairs if some for x in np.exp(np.percentile(np.log(some), (5, 95)))]
    axis = axis_of([*usual, *(x for estimate in ranges for x in estimate.factors)])
    size_in = rcParams["figure.figsize"][0], _AXIS_IN + _ROW_IN * len(ranges)
    figure = NotebookFigure(figsize=size_in, layout="constrained")
    axes, words = figure.subplots(), []
    for row, (comparison, estimate, points) in enumerate(zip(comparisons, ranges, pairs, strict=True)):
        if estimate.middle is None or comparison.ratio is None:
            words.append(f"{comparison.verdict}")
            continue
        words.append(f"{comparison.verdict}\n{speed_figures(comparison.ratio, comparison.interval)}")
        floor, (low, high) = 1 + estimate.floor, estimate.interval or (estimate.middle, estimate.middle)
        if estimate.floor:
            shade = {"color": rcParams["text.color"], "alpha": 0.15}
            axes.barh(row, floor - 1 / floor, 0.9, 1 / floor, label="noise", **shade)
        if points:
            axes.plot(points, np.full(len(points), row + 0.28), ".", color="C1", markersize=4, label="a pair of blocks")
        error = [[estimate.middle - low], [high - estimate.middle]]
        label = _lines("median, 95 % interval", _TITLE)
        axes.errorbar(estimate.middle, row, xerr=error, fmt="o", color="C0", capsize=3, label=label)
    axes.axvline(1, color=rcParams["axes.edgecolor"], linewidth=1)
    axes.set(xscale="log", xlim=(axis.low, axis.high), ylim=(len(ranges) - 0.5, -0.5))
    ticks = factor_ticks(axis.low, axis.high)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(ranges)), [_lines(name(c.b), _SETTING) for c in comparisons])
    units = sorted({c.unit for c, estimate in zip(comparisons, ranges, strict=True) if estimate.middle})
    axes.set_xlabel(_lines(f"speedup vs. {name(comparisons[0].a)}, per {' or '.join(units)} (log scale)", _TITLE))
    beside = axes.secondary_yaxis("right")
    beside.set_yticks(range(len(ranges)), words, fontsize="small")
    beside.tick_params(length=0)
    _legend(axes, columns=3)
    return figure


def _legend(axes: Axes, title: str = "", columns: int = 2) -> None:
    """Write the title and the legend above the panel; each colour is explained once."""
    keys = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    style = {"frameon": False, "borderaxespad": 0.2, "fontsize": "small", "alignment": "left", "ncols": columns}
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), **style}
    axes.legend(list(keys.values()), list(keys), title=_lines(title, _TITLE), **place)


def _lines(text: str, width: int) -> str:
    """Text in at most three lines, escaped so that matplotlib reads no part as a formula or a TeX command."""
    lines = textwrap.wrap(wording.plain(text), width, max_lines=3, placeholder=" …")
    return re.sub(r"([$%&#_{}])" if rcParams["text.usetex"] else r"(\$)", r"\\\1", "\n".join(lines))
