"""The picture of a sweep: per setting its step, its speed with the interval, and its memory, one line each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from gpulab.formatting import size, speed_within
from gpulab.tuning.compare.headline import experiment_headline
from gpulab.tuning.record import Comparison, Experiment, Side
from gpulab.views.comparison import figure_panels as panels
from gpulab.views.comparison.figure import title_only
from gpulab.views.comparison.part_times import of_setting, per_sample
from gpulab.views.comparison.sweep import none_ran, opening
from gpulab.views.comparison.table import memory_peak_bytes, name
from gpulab.views.drawing import (
    GREY,
    SMALL_PT,
    frame,
    ink,
    ink_lines,
    legend_beside,
    picture,
    place,
    title_height_in,
    title_lines,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEFT_IN, _STEP_IN, _RATIO_IN, _MEMORY_IN, _BETWEEN_IN = 1.75, 3.6, 2.8, 1.8, 0.3
_LINE_IN, _ABOVE_IN, _BELOW_IN = 0.5, 0.5, 0.6
_KEYS_IN = 0.2
_MOST = 16
_COLOURS = {"faster": "#00704F", "slower": "#B8430B"}


def draw(experiment: Experiment) -> bytes:
    """The picture as PNG, 1100 pixels wide, at most 16 settings. Main thread only."""
    lines = title_lines(experiment_headline(experiment), opening(experiment))
    if none_ran(experiment):
        return title_only(lines)
    shown = experiment.sides[:_MOST]
    panel_in = max(_LINE_IN * len(shown), 1.0)
    columns = [of_setting(side, experiment) for side in shown]
    keys = panels.part_keys(columns)
    keys_in = _KEYS_IN * -(-len(keys) // 3) + 0.15

    def fill(figure: Figure, top_in: float) -> None:
        bottom = top_in - _ABOVE_IN - panel_in
        steps = place(figure, _LEFT_IN, bottom, _STEP_IN, panel_in)
        _steps(steps, experiment, shown, columns)
        _speeds(place(figure, _LEFT_IN + _STEP_IN + _BETWEEN_IN, bottom, _RATIO_IN, panel_in), experiment, len(shown))
        left = _LEFT_IN + _STEP_IN + _RATIO_IN + 2 * _BETWEEN_IN
        _memory(place(figure, left, bottom, _MEMORY_IN, panel_in), shown)
        for column in range(3):
            corner = place(figure, _LEFT_IN + 2.6 * column, bottom - _BELOW_IN - 0.01, 0.01, 0.01)
            corner.set_axis_off()
            some = keys[column::3]
            if some:
                legend_beside(corner, some, offset_in=0.0, spare_in=keys_in)

    total_in = title_height_in(lines) + _ABOVE_IN + panel_in + _BELOW_IN + keys_in + 0.1
    return picture(lines, total_in, fill)


def _steps(axes: Axes, experiment: Experiment, shown: tuple[Side, ...], columns: list[dict[str, float]]) -> None:
    unit = "sample" if per_sample(experiment) else "step"
    frame(axes, f"Time of a {unit}")
    labels = [(name(side), panels.A_COLOUR if i == 0 else panels.B_COLOUR) for i, side in enumerate(shown)]
    panels.stacked_bars(axes, columns, labels)
    axes.set_xlabel(f"{axes.get_xlabel()}; colours: shares in one profiled run of each", fontsize=SMALL_PT)
    for row, side in enumerate(shown):
        if side.failure:
            text = "\n".join(ink_lines(side.failure, 44, 2))
            y = len(shown) - 1 - row
            axes.text(0.01 * axes.get_xlim()[1], y, text, color=_COLOURS["slower"], fontsize=SMALL_PT, va="center")


def _speeds(axes: Axes, experiment: Experiment, count: int) -> None:
    """How many times as fast as A, with the intervals; the band is the widest noise floor of them. Logarithmic."""
    frame(axes, "Times as fast as the first")
    _quiet_rows(axes, count)
    floor = 1 + max((c.noise_floor or 0.0 for c in experiment.comparisons), default=0.0)
    axes.axvspan(1 / floor, floor, color="#EDEDED", linewidth=0, zorder=0)
    axes.axvline(1, color=panels.A_COLOUR, linewidth=1)
    reach = [1 / floor, floor]
    for row, compared in enumerate(experiment.comparisons[: count - 1], start=1):
        if compared.times_as_fast is not None:
            _speed(axes, compared, count - 1 - row)
            reach += [compared.times_as_fast, *(compared.times_as_fast_interval or ())]
    low, high = math.log(min(reach)), math.log(max(reach))
    room = max(0.08 * (high - low), 0.01)
    panels.logarithmic(axes, "x", math.exp(low - room), math.exp(high + room + 0.22 * (high - low)))
    axes.set_xlabel("times", fontsize=SMALL_PT)


def _speed(axes: Axes, compared: Comparison, y: float) -> None:
    assert compared.ratio is not None and compared.times_as_fast is not None
    colour = _COLOURS.get(compared.verdict, GREY)
    low, high = compared.times_as_fast_interval or (compared.times_as_fast, compared.times_as_fast)
    axes.plot([low, high], [y, y], color=colour, linewidth=3, solid_capstyle="round")
    axes.plot([compared.times_as_fast], [y], "o", color=colour, markersize=6)
    axes.annotate(
        speed_within(compared.ratio, compared.interval)[0], (high, y), xytext=(5, 0), textcoords="offset points",
        va="center", fontsize=SMALL_PT, color=colour,
    )  # fmt: skip


def _memory(axes: Axes, shown: tuple[Side, ...]) -> None:
    frame(axes, "Peak memory")
    _quiet_rows(axes, len(shown))
    peaks = [memory_peak_bytes(side) for side in shown]
    highest = max([1, *(peak for peak in peaks if peak is not None)])
    for row, (side, peak) in enumerate(zip(shown, peaks, strict=True)):
        y = len(shown) - 1 - row
        if peak is not None:
            axes.barh(y, peak / highest, height=0.5, color="#9FB4C7", linewidth=0)
        end = 0.0 if peak is None else peak / highest
        axes.text(end + 0.04, y, ink(_memory_words(side, peak)), va="center", fontsize=SMALL_PT, color="black")
    axes.set_xlim(0, 1.7)  # the figure stands behind the bar
    axes.set_xticks([])


def _memory_words(side: Side, peak: int | None) -> str:
    if not side.failure:
        return size(peak)
    return "out of memory" if side.failure.startswith("out of memory") else "–"


def _quiet_rows(axes: Axes, count: int) -> None:
    """The rows of the bars on the left, without their labels."""
    axes.set_ylim(-0.6, count - 0.4)
    axes.set_yticks(np.arange(count), [""] * count)
    axes.tick_params(axis="y", length=0)
