"""For papers and slides, in the user's own style: `run.plot()`, `comparison.plot()`. Imported when asked for."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gpulab.analysis.facts import Facts, facts
from gpulab.errors import UsageError
from gpulab.formatting import duration, speed_figures, time_unit
from gpulab.run import Run, Series
from gpulab.tuning.bench import pair_speeds, rows_of
from gpulab.tuning.record import Comparison
from gpulab.views import run_figure, wording
from gpulab.views.bars import axis_of, factor_ticks
from gpulab.views.bench import factor_ranges
from gpulab.views.comparison_sections import name
from gpulab.views.report.sections import has_no_step

_MOST_POINTS, _MOST_CURVES = 350, 6
_NARROWEST, _LEAST = 0.003, 0.01  # a bar's share of the panel; a part's share of the step, to be named
_TITLE, _LABEL, _SETTING = 72, 34, 24  # characters of a line
_ROW_IN, _AXIS_IN = 0.45, 1.2  # of a comparison: a setting, and what stands around all of them


class NotebookFigure(Figure):
    """A figure that a notebook shows, though pyplot does not know it."""

    def _repr_png_(self) -> bytes:
        self.savefig(png := io.BytesIO(), format="png")
        return png.getvalue()


def plot_run(run: Run) -> Figure:
    """Where a typical step's time goes, the steps over time, the device's curves: what there is of these.

    Raises UsageError where there is none.
    """
    shown = facts(run)
    panels = [(1, _typical_step)] if run_figure.segments(shown) else []
    panels += [(4, _steps)] if _has_steps(run) else []
    panels += [(3, _device)] if any(run_figure.of_device(run.samples)) else []
    if not panels:
        raise UsageError(f"There is nothing to plot of {run.name}: no steps, no curves. Mark steps with gpulab.step().")
    figure = NotebookFigure(layout="constrained")
    every = np.ravel(figure.subplots(len(panels), height_ratios=[height for height, _ in panels]))
    for axes, (_, draw) in zip(every, panels, strict=True):
        draw(axes, shown)
    return figure


def _has_steps(run: Run) -> bool:
    return len(run.steps) > 1 and not has_no_step(run)


def _typical_step(axes: Axes, shown: Facts) -> None:
    looks, left = _looks(shown), 0.0
    for part in run_figure.segments(shown):
        label = _lines(f"{part.label}: {part.words}", _TITLE) if part.share >= _LEAST else "_"
        axes.barh(0, part.share, left=left, height=1, label=label, **looks.pop(part.label))
        left += part.share
    for label, look in looks.items():  # what only the panel below shows
        axes.barh(0, 0, left=1, label=label, **look)
    axes.set(xlim=(0, 1), ylim=(-0.5, 0.5), xticks=[], yticks=[])
    _title(axes, run_figure.title(shown))
    _legend(axes, loc="upper left", bbox_to_anchor=(0, 0))


def _steps(axes: Axes, shown: Facts) -> None:
    binned, looks = run_figure.binned_steps(shown), _looks(shown)
    top_us, highest_us = 1e3 * binned.top_ms, 1e3 * float(binned.height_ms.max())
    unit_us, unit = time_unit(top_us)
    scale_us = _time_axis(axes, shown, labelled=not any(run_figure.of_device(shown.run.samples)))
    left, right = binned.left_s * 1e6 / scale_us, binned.right_s * 1e6 / scale_us
    width = np.maximum(right - left, _NARROWEST * axes.get_xlim()[1])
    base = np.zeros(len(left))
    for part, ms in binned.parts_ms.items():
        if ms.any():
            high = ms * 1e3 / unit_us
            axes.bar(left, high, width, base, align="edge", **looks[_label(part, shown)])
            base += high
    axes.set(ylim=(0, 1.05 * top_us / unit_us or 1), ylabel=f"{unit} per step")
    each = "one bar per step" if binned.per_bar == 1 else f"each bar the mean of up to {binned.per_bar:,}"
    cut = f"; the highest, {duration(highest_us)}, is cut" if highest_us > top_us else ""
    _title(axes, f"{len(shown.run.steps):,} steps, {each}{cut}")


def _looks(shown: Facts) -> dict[str, dict[str, Any]]:
    """The colour of each part by its label: the cycle's, hatched where that begins anew."""
    drawn = {part.label for part in run_figure.segments(shown)}
    if _has_steps(shown.run):
        drawn |= {_label(part, shown) for part, ms in run_figure.binned_steps(shown).parts_ms.items() if ms.any()}
    ordered = [label for part in (*wording.PARTS, run_figure.REST) if (label := _label(part, shown)) in drawn]
    colours = len(rcParams["axes.prop_cycle"].by_key().get("color", "k"))
    return {label: {"color": f"C{i}", "hatch": "//" * (i // colours)} for i, label in enumerate(ordered)}


def _label(part: str, shown: Facts) -> str:
    if part in wording.PARTS:
        return wording.PARTS[part].label
    return wording.NOT_PROFILED.label if shown.breakdown is not None else run_figure.REST_LABEL


def _device(axes: Axes, shown: Facts) -> None:
    percents, memory = (series[:_MOST_CURVES] for series in run_figure.of_device(shown.run.samples))
    scale_us = _time_axis(axes, shown)
    lines = [_curve(axes, s, run_figure.percent_scale(s), scale_us, f"C{i}") for i, s in enumerate(percents)]
    if percents:
        axes.set(ylim=(0, max(105, axes.get_ylim()[1])), ylabel=_lines("%", 1))
    if memory:
        beside = axes.twinx() if percents else axes
        scale, unit = run_figure.memory_scale(memory)
        for i, series in enumerate(memory, len(percents)):
            lines.append(_curve(beside, series, scale, scale_us, f"C{i}", "--"))
        beside.set(ylim=(0, run_figure.highest(memory) * scale * 1.1 or 1), ylabel=unit)
    _legend(axes, handles=lines, loc="lower left", bbox_to_anchor=(0, 1))


def _curve(axes: Axes, series: Series, scale: float, scale_us: float, colour: str, dashes: str = "-") -> Line2D:
    t_ns, low, mean, high = run_figure.at_most(series, _MOST_POINTS)
    t = t_ns / 1e3 / scale_us
    if len(t) < len(series.t_ns):
        axes.fill_between(t, low * scale, high * scale, color=colour, alpha=0.2, linewidth=0)
    what = _lines(f"{series.label} ({series.source})", _LABEL)
    return axes.plot(t, mean * scale, dashes, color=colour, label=what)[0]


def _time_axis(axes: Axes, shown: Facts, *, labelled: bool = True) -> float:
    """The whole run from left to right; returns the axis' unit in µs."""
    wall_us = max(shown.run.wall_ns, 1) / 1e3
    scale_us, unit = (60e6, "min") if wall_us > 600e6 else (1e6, "s")
    axes.set(xlim=(0, wall_us / scale_us), xlabel=f"time since the start of the run ({unit})" if labelled else "")
    axes.tick_params(labelbottom=labelled)
    return scale_us


def plot_comparisons(comparisons: Sequence[Comparison]) -> Figure:
    """How many times as fast each setting is as the first, with the 95 % interval, the noise and the pairs of blocks.

    Raises UsageError where no setting could be compared.
    """
    first, *rows = rows_of(comparisons)
    ranges = factor_ranges([first, *rows])[1:]
    pairs = [pair_speeds(first, row) for row in rows]
    if not any(shown.middle for shown in ranges):
        raise UsageError("There is nothing to plot: no setting could be compared with the first. Its .text() says why.")
    usual = [float(x) for some in pairs if some for x in np.exp(np.percentile(np.log(some), (5, 95)))]
    axis = axis_of([*usual, *(x for shown in ranges for x in shown.factors)])
    size_in = rcParams["figure.figsize"][0], _AXIS_IN + _ROW_IN * len(ranges)
    figure = NotebookFigure(figsize=size_in, layout="constrained")
    axes, words = figure.subplots(), []
    for row, (comparison, shown, points) in enumerate(zip(comparisons, ranges, pairs, strict=True)):
        if shown.middle is None or comparison.ratio is None:
            words.append(f"{comparison.verdict}")
            continue
        words.append(f"{comparison.verdict}\n{speed_figures(comparison.ratio, comparison.interval)}")
        floor, (low, high) = 1 + shown.floor, shown.interval or (shown.middle, shown.middle)
        if shown.floor:
            shade = {"color": rcParams["text.color"], "alpha": 0.15}
            axes.barh(row, floor - 1 / floor, 0.9, 1 / floor, label="noise", **shade)
        if points:
            axes.plot(points, np.full(len(points), row + 0.28), ".", color="C1", markersize=4, label="a pair of blocks")
        error = [[shown.middle - low], [high - shown.middle]]
        label = _lines("median, 95 % interval", _TITLE)
        axes.errorbar(shown.middle, row, xerr=error, fmt="o", color="C0", capsize=3, label=label)
    axes.axvline(1, color=rcParams["axes.edgecolor"], linewidth=1)
    axes.set(xscale="log", xlim=(axis.low, axis.high), ylim=(len(ranges) - 0.5, -0.5))
    ticks = factor_ticks(axis.low, axis.high)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(ranges)), [_lines(name(c.b), _SETTING) for c in comparisons])
    units = sorted({c.unit for c, shown in zip(comparisons, ranges, strict=True) if shown.middle})
    axes.set_xlabel(_lines(f"speedup vs. {name(comparisons[0].a)}, per {' or '.join(units)} (log scale)", _TITLE))
    beside = axes.secondary_yaxis("right")
    beside.set_yticks(range(len(ranges)), words, fontsize="small")
    beside.tick_params(length=0)
    keys = {line.get_label(): line for line in axes.get_legend_handles_labels()[0]}
    _legend(axes, handles=list(keys.values()), loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    return figure


def _title(axes: Axes, text: str) -> None:
    axes.set_title(_lines(text, _TITLE), loc="left", fontsize="medium")


def _legend(axes: Axes, **where: Any) -> None:
    axes.legend(**{"ncols": 2, **where}, fontsize="small", frameon=False, borderaxespad=0.2)


def _lines(text: str, width: int) -> str:
    """Text as matplotlib shall draw it, in at most three lines: neither a formula nor a command of TeX."""
    lines = textwrap.wrap(wording.plain(text), width, max_lines=3, placeholder=" …")
    return re.sub(r"([$%&#_{}])" if rcParams["text.usetex"] else r"(\$)", r"\\\1", "\n".join(lines))
