"""The panels of the picture of a comparison: A is grey and B violet in all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from gpulab.formatting import duration, percent, speed_figures, time_unit
from gpulab.run import Float64, Series
from gpulab.tuning.compare.blocks import pair_ratios, same_ratios
from gpulab.tuning.compare.verdicts import us, usable
from gpulab.tuning.record import Comparison
from gpulab.views import curves, wording
from gpulab.views.comparison.part_times import WHOLE
from gpulab.views.comparison.part_times import of_both as times_of_both
from gpulab.views.comparison.table import name
from gpulab.views.drawing import GREY, SMALL_PT, Dashes, Key, frame, ink, ink_lines, legend_beside, rectangles, say
from gpulab.views.interval_places import LEAST_SPAN, factor_ticks
from gpulab.views.wording import cut

if TYPE_CHECKING:
    from matplotlib.axes import Axes

A_COLOUR, B_COLOUR = "#6E6E6E", "#5B2A86"
_BAND, _FLOOR, _SEEDS = "#D9CBE8", "#EDEDED", "#C4C4C4"
_UNSPLIT = "#BDBDBD"
_OF_PROFILED = "; colours: the shares in one profiled run of each"
_ROOM = 1.25  # times the longest bar: its figure stands behind it
_PREDICTED = "#B35900"
_WORKING = ("gpu_utilization_pct", "sm_active_fraction", "cpu_pct")  # curves of work, the first two that were measured
_MEMORY = ("gpu_memory_used_bytes", "rss_bytes")
_OfBoth = list[tuple[Series, str]]
_DASHES: tuple[Dashes, ...] = ("-", ":")
_LABEL = 16  # characters of a line beside a bar
_NAMES, _MORE_NAMES = 0.36, 0.55  # room above the points for two names or three, as a share of their span
_OUTLIERS = (2, 98)  # percentiles of the blocks that the axis must reach


# bars


def bars(axes: Axes, comparison: Comparison) -> None:
    """One bar per side, as long as its blocks say, coloured by the shares of the parts in its one profiled run."""
    columns, per_sample = times_of_both(comparison)
    labels = [("A  " + name(comparison.a), A_COLOUR), ("B  " + name(comparison.b), B_COLOUR)]
    divided = any(parts.keys() - {WHOLE} for parts in columns)
    frame(axes, f"Time of a {'sample' if per_sample else 'step'}{_OF_PROFILED if divided else ''}")
    if not any(columns):
        say(axes, "Not measurable.")
        return
    stacked_bars(axes, columns, labels)
    legend_beside(axes, part_keys(columns), offset_in=0.3, spare_in=0.75)


def stacked_bars(axes: Axes, columns: Sequence[Mapping[str, float]], labels: Sequence[tuple[str, str]]) -> None:
    """Horizontal bars from top to bottom: parts in µs, the time at the end of each, and a label with its colour."""
    ends = [sum(parts.values()) for parts in columns]
    highest = max([1e-9, *ends])
    scale, unit = time_unit(highest)
    middle = np.arange(len(columns), dtype=np.float64)[::-1]
    left = np.zeros(len(columns))
    for key, (colour, hatch) in _looks().items():
        width = np.array([parts.get(key, 0.0) / scale for parts in columns])
        drawn = width > 0
        if drawn.any():
            low, high = middle[drawn] - 0.34, middle[drawn] + 0.34
            rectangles(axes, left[drawn], left[drawn] + width[drawn], low, high, colour, hatch=hatch, edge=0.5)
        left = left + width
    for y, end in zip(middle, ends, strict=True):
        if end:
            axes.annotate(
                duration(end), (end / scale, y), xytext=(4, 0), textcoords="offset points", va="center",
                fontsize=SMALL_PT, color="black",
            )  # fmt: skip
    axes.set_xlim(0, highest / scale * _ROOM)
    axes.set_ylim(-0.6, len(columns) - 0.4)
    axes.set_yticks(middle, ["\n".join(_label_lines(label)) for label, _ in labels])
    for tick, (_, colour) in zip(axes.get_yticklabels(), labels, strict=True):
        tick.set_color(colour)
        tick.set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(unit, fontsize=SMALL_PT)


def _looks() -> dict[str, tuple[str, str]]:
    """Colour and hatch by part, in stacking order; last what no part tells."""
    return {**{key: (part.colour, part.hatch) for key, part in wording.PARTS.items()}, WHOLE: (_UNSPLIT, "")}


def _label_lines(label: str) -> list[str]:
    """A long setting is broken behind its "=", not within its value."""
    pieces = [word if len(word) <= _LABEL else word.replace("=", "= ") for word in label.split(" ")]
    return ink_lines(" ".join(pieces), _LABEL, 3)


def part_keys(columns: Sequence[Mapping[str, float]]) -> list[Key]:
    """A legend of the parts that are there, in stacking order."""
    shown = [part for key, part in wording.PARTS.items() if any(parts.get(key, 0) > 0 for parts in columns)]
    return [Key(part.label, part.colour, part.hatch) for part in shown]


# speeds


def speeds(axes: Axes, comparison: Comparison) -> None:
    """Each block's speed, the median with its interval, and the band in which A differs from itself; logarithmic."""
    interleaved = comparison.evidence == "interleaved"
    of_b, of_a = _paired_points(comparison) if interleaved else _unpaired_points(comparison)
    frame(axes, f"{'Pairs of blocks' if interleaved else 'Blocks'}: how many times as fast, per {comparison.unit}")
    if comparison.times_as_fast is None or not len(of_b):
        say(axes, "No ratio can be given.")
        return
    if comparison.noise_floor:
        floor = 1 + comparison.noise_floor
        axes.axhspan(1 / floor, floor, color=_FLOOR, linewidth=0, zorder=0)
    if comparison.times_as_fast_interval is not None:
        axes.axhspan(*comparison.times_as_fast_interval, color=_BAND, linewidth=0, zorder=0.5, alpha=0.8)
    axes.axhline(1, color=A_COLOUR, linewidth=1, zorder=1)
    axes.axhline(comparison.times_as_fast, color=B_COLOUR, linewidth=1.6, zorder=1.5)
    prediction = _estimate(comparison)
    if prediction is not None:
        axes.axhline(1 / prediction[0], color=_PREDICTED, linewidth=1.4, linestyle=":", zorder=1.4)
    axes.plot(np.arange(1, len(of_a) + 1), of_a, "x", color=A_COLOUR, markersize=4.5, zorder=2)
    axes.plot(np.arange(1, len(of_b) + 1), of_b, "o", color=B_COLOUR, markersize=4.5, zorder=3)
    _reach(axes, of_a, of_b, comparison)
    _count_axis(axes, max(len(of_a), len(of_b)), "pair" if interleaved else "block")
    _speed_keys(axes, comparison, interleaved)


def _estimate(comparison: Comparison) -> tuple[float, tuple[float, float]] | None:
    """The predicted ratio and its range; a mere range stands in the tables only."""
    prediction = comparison.b.prediction
    if prediction is None or prediction.only_sign or prediction.ratio is None or prediction.interval is None:
        return None
    return prediction.ratio, prediction.interval


def _paired_points(comparison: Comparison) -> tuple[Float64, Float64]:
    of_b = pair_ratios(comparison.a, comparison.b, comparison.unit)
    return 1 / of_b, 1 / same_ratios(comparison.a, comparison.unit)


def _unpaired_points(comparison: Comparison) -> tuple[Float64, Float64]:
    """The median block of A over every block."""
    of_a, of_b = (
        np.array([us(x, comparison.unit) for x in usable(side)], np.float64) for side in (comparison.a, comparison.b)
    )
    middle = float(np.median(of_a)) if len(of_a) else 1.0
    return middle / of_b, middle / of_a


def _reach(axes: Axes, of_a: Float64, of_b: Float64, comparison: Comparison) -> None:
    """The axis holds the bands and nearly all blocks; one that stands far out is not worth flattening the others."""
    points = np.log(np.concatenate([of_a, of_b]))
    floor = math.log1p(comparison.noise_floor or 0.0)
    inside = [-floor, floor, *np.percentile(points, _OUTLIERS)]
    inside += [math.log(edge) for edge in comparison.times_as_fast_interval or ()]
    prediction = _estimate(comparison)
    names = _NAMES if prediction is None else _MORE_NAMES
    inside += [-math.log(prediction[0])] if prediction is not None else []
    low, high = min(inside), max(inside)
    for point in np.sort(points):  # none stands where the names need their room
        if point < high + names * max(high - low, LEAST_SPAN):
            high = max(high, float(point))
    span = max(high - low, LEAST_SPAN)
    bottom, top = low - 0.1 * span, high + names * span
    logarithmic(axes, "y", math.exp(bottom), math.exp(top))
    out = int(((points < bottom) | (points > top)).sum())
    if out:
        axes.annotate(
            f"{out} not shown: far out", (1, 0), xycoords="axes fraction", xytext=(0, 3), textcoords="offset points",
            ha="right", fontsize=SMALL_PT - 1, color=GREY,
        )  # fmt: skip


def logarithmic(axes: Axes, which: Literal["x", "y"], low: float, high: float) -> None:
    """An axis of factors: as far from 1 to 2 as from 1 to a half, and never at zero."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)
    axis.set_major_locator(FixedLocator(factor_ticks(low, high)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _count_axis(axes: Axes, count: int, what: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0.4, count + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.set_xlabel(what, fontsize=SMALL_PT)


def _speed_keys(axes: Axes, comparison: Comparison, interleaved: bool) -> None:
    assert comparison.ratio is not None
    floor = "" if comparison.noise_floor is None else f", noise floor {percent(comparison.noise_floor)}"
    same = "A against itself" if interleaved else "A"
    predicted, prediction = [], _estimate(comparison)
    if prediction is not None:
        predicted = [(f"┄ predicted {speed_figures(*prediction)}", _PREDICTED)]
    measured = f"● B: {speed_figures(comparison.ratio, comparison.interval)}"
    direct(axes, [(measured, B_COLOUR), *predicted, (f"× {same}{floor}", A_COLOUR)])


# losses and curves


def losses(axes: Axes, comparison: Comparison) -> None:
    """Both curves on one axis, over the band of seeds where there is one."""
    frame(axes, "Loss")
    loss = comparison.loss
    assert loss is not None
    if not (np.isfinite(loss.a).any() or np.isfinite(loss.b).any()):
        say(axes, f"{loss.words}.")
        return
    if loss.band:
        low, high = np.array(loss.band, np.float64).T
        axes.fill_between(np.arange(1, len(low) + 1), low, high, color=_SEEDS, linewidth=0)
    for curve, colour, dashes, width in ((loss.a, A_COLOUR, "-", 2.6), (loss.b, B_COLOUR, "--", 1.5)):
        axes.plot(np.arange(1, len(curve) + 1), curve, color=colour, linestyle=dashes, linewidth=width)
    axes.margins(x=0.01)
    low_y, high_y = axes.get_ylim()
    axes.set_ylim(low_y, high_y + 0.25 * (high_y - low_y))
    axes.set_xlabel("step", fontsize=SMALL_PT)
    keys = [("A", A_COLOUR), (f"B: {loss.verdict}", B_COLOUR)]
    direct(axes, [*keys, *([(f"band of {loss.seeds + 1} seeds", GREY)] if loss.band else [])], right=True)


def has_curves(comparison: Comparison) -> bool:
    """Whether a curve of either side can be drawn."""
    return any(_series(comparison, kind) for kind in (*_WORKING, *_MEMORY))


def working(axes: Axes, comparison: Comparison) -> None:
    """How busy the device was in the profiled run of each."""
    frame(axes, "Device, in one profiled run of each")
    _curves(axes, _measured(comparison, _WORKING)[:2], curves.percent_scale)
    axes.set_ylim(0, max(106.0, axes.get_ylim()[1]) * 1.25)
    axes.set_ylabel("%", fontsize=SMALL_PT)


def memory(axes: Axes, comparison: Comparison) -> None:
    """The memory of each."""
    frame(axes, "Memory, in one profiled run of each")
    shown = _measured(comparison, _MEMORY)[:1]
    scale, unit = curves.memory_scale([series for of_both in shown for series, _ in of_both])
    _curves(axes, shown, lambda _: scale)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.3)
    axes.set_ylabel(unit, fontsize=SMALL_PT)


def _curves(axes: Axes, shown: Sequence[_OfBoth], scale: Callable[[Series], float]) -> None:
    """Curves of both on one axis of time: the side is the colour, what is read the dashes."""
    if not shown:
        say(axes, "Not measured.")
        return
    for of_both, dashes in zip(shown, _DASHES, strict=False):
        for series, colour in of_both:
            curves.plot(axes, series, scale(series), colour, dashes)
    axes.set_xlabel("time since the start of the run (s)", fontsize=SMALL_PT)
    axes.set_xlim(left=0)
    marks = {"-": "—", ":": "···"}
    direct(axes, [(f"{marks[d]} {of[0][0].label}", GREY) for of, d in zip(shown, _DASHES, strict=False)])


def _measured(comparison: Comparison, kinds: Sequence[str]) -> list[_OfBoth]:
    return [of_both for kind in kinds if (of_both := _series(comparison, kind))]


def _series(comparison: Comparison, kind: str) -> _OfBoth:
    """The curve of each side that has it, with the colour of the side."""
    sides = ((comparison.a.facts, A_COLOUR), (comparison.b.facts, B_COLOUR))
    readings = ((facts.run.samples.get(kind), colour) for facts, colour in sides if facts is not None)
    return [(series, colour) for series, colour in readings if series is not None and curves.has_readings(series)]


# names in panels


def direct(axes: Axes, lines: Sequence[tuple[str, str]], *, right: bool = False) -> None:
    """Names in their colours at the top of a panel."""
    for i, (text, colour) in enumerate(lines):
        place, side = ((1, 1), "right") if right else ((0, 1), "left")
        axes.annotate(
            ink(cut(text, 48)), place, xycoords="axes fraction", xytext=(-4 if right else 4, -3 - 13 * i),
            textcoords="offset points", ha=side, va="top", fontsize=SMALL_PT, color=colour,
        )  # fmt: skip
