"""The picture of a comparison as HTML: both times by their parts, and how many times as fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gpulab.formatting import NOT_MEASURABLE, capitalized, duration, percent
from gpulab.tuning.compare.blocks import pair_ratios
from gpulab.tuning.record import Comparison, Experiment
from gpulab.views import html_bars, wording
from gpulab.views.comparison.prediction import speed_words
from gpulab.views.comparison.sections import never_ran
from gpulab.views.comparison.sweep import none_ran
from gpulab.views.comparison.table import name
from gpulab.views.comparison.time_rows import of_both, per_sample, time_rows, us
from gpulab.views.html_rows import (
    FLOOR,
    POINT,
    PREDICTED,
    UNDECIDED,
    VERDICTS,
    FactorRange,
    factor_axis,
    factor_row,
    key,
    picture,
    row,
)
from gpulab.views.interval_places import FactorAxis, axis_of

_OF_PROFILED = "split as in one profiled run each"
_MOST_POINTS = 60
_MOST_ROWS = 16


def of_two(comparison: Comparison) -> str:
    """Both times, and how many times as fast; empty where a side never ran."""
    return "" if never_ran(comparison) else picture(_both_times(comparison), _factor(comparison))


def of_many(experiment: Experiment) -> str:
    """A row per setting on one axis; empty where none ran."""
    if none_ran(experiment) or not experiment.comparisons:
        return ""
    ranges = {c.b.label: factor_range(c) for c in experiment.comparisons if c.times_as_fast}
    axis = axis_of(factor for one in ranges.values() for factor in one.factors)
    unit = "sample" if per_sample(experiment) else "step"
    shown = experiment.comparisons[: _MOST_ROWS - 1]
    rows = [_setting(c, ranges[c.b.label], axis, experiment) for c in shown if c.b.label in ranges]
    without = [_not_compared(c) for c in shown if c.b.label not in ranges]
    if not ranges:
        return picture(*without)
    first = experiment.sides[0]
    reference = f"{name(first)}, {duration(us(first, experiment))} per {unit}"
    title = html_bars.caption(f"Speedup per {unit} vs. {reference} (log scale)")
    left_out = len(experiment.comparisons) - len(shown)
    more = html_bars.caption(f"{left_out} more stand in the table") if left_out else ""
    return picture(title, *rows, factor_axis(axis), _keys(list(ranges.values()), ""), *without, more)


def factor_range(comparison: Comparison) -> FactorRange:
    """The factor in the colour of its verdict, with its interval and the noise."""
    assert comparison.times_as_fast is not None
    prediction = comparison.b.prediction
    predicted = prediction.interval if prediction is not None and not prediction.only_sign else None
    return FactorRange(
        comparison.times_as_fast,
        comparison.times_as_fast_interval,
        VERDICTS.get(comparison.verdict, UNDECIDED),
        comparison.noise_floor or 0.0,
        predicted=(1 / predicted[1], 1 / predicted[0]) if predicted and predicted[0] > 0 else None,
    )


# both times


def _both_times(comparison: Comparison) -> str:
    columns, of_samples = of_both(comparison)
    if not any(columns):
        return ""
    names = [f"A: {name(comparison.a)}", f"B: {name(comparison.b)}"]
    title = f"Time per {'sample' if of_samples else 'step'}"
    figures = [duration(sum(parts.values())) if parts else NOT_MEASURABLE for parts in columns]
    return html_bars.caption(_titled(title, columns)) + time_rows(names, columns, figures)


def _titled(title: str, columns: Sequence[Mapping[str, float]]) -> str:
    return f"{title}; {_OF_PROFILED}" if any(parts.keys() & wording.PARTS.keys() for parts in columns) else title


# factors


def _factor(comparison: Comparison) -> str:
    if not comparison.times_as_fast:
        return ""
    shown = factor_range(comparison)
    points = pair_speeds(comparison)
    axis = axis_of([*shown.factors, *usual(points)])
    shown = FactorRange(shown.middle, shown.interval, shown.colour, shown.floor, points, shown.predicted)
    title = f"Speedup per {comparison.unit} vs. {name(comparison.a)} (log scale)"
    marks = f"{len(points)} pairs of blocks" if len(points) == comparison.pairs else f"{len(points)} of the pairs"
    return (
        html_bars.caption(title)
        + row(name(comparison.b), _figures(comparison), factor_row(axis, shown))
        + factor_axis(axis)
        + _keys([shown], marks if points else "")
    )


def pair_speeds(comparison: Comparison) -> tuple[float, ...]:
    """How many times as fast in each pair of blocks, at most 60 of them; none where the runs came one by one."""
    if comparison.evidence != "interleaved":
        return ()
    speeds = 1 / pair_ratios(comparison.a, comparison.b, comparison.unit)
    return tuple(speeds[np.isfinite(speeds)].tolist()[:_MOST_POINTS])


def usual(points: Sequence[float]) -> tuple[float, ...]:
    """The outermost points but for those far out, which would flatten all others."""
    return tuple(float(x) for x in np.exp(np.percentile(np.log(points), (5, 95)))) if points else ()


def _figures(comparison: Comparison) -> str:
    assert comparison.ratio is not None
    return f"{speed_words(comparison.ratio, comparison.interval)}: {comparison.verdict}"


def _keys(ranges: Sequence[FactorRange], marks: str) -> str:
    colours = dict.fromkeys(one.colour for one in ranges)
    entries = [(colour, "median, 95 % interval") for colour in list(colours)[:1]]
    if len(colours) > 1:
        named = {colour: verdict for verdict, colour in VERDICTS.items()} | {UNDECIDED: "undecided, or the same"}
        entries = [(colour, f"{named[colour]}, 95 % interval") for colour in named if colour in colours]
    floor = max(one.floor for one in ranges)
    if floor:
        most = "at most " if len({one.floor for one in ranges}) > 1 else ""
        entries.append((FLOOR, f"run-to-run noise, {most}{percent(floor)}"))
    if any(one.predicted for one in ranges):
        entries.append((PREDICTED, "predicted"))
    if marks:
        entries.append((POINT, marks))
    return key(entries)


def _setting(comparison: Comparison, shown: FactorRange, axis: FactorAxis, experiment: Experiment) -> str:
    time = us(comparison.b, experiment)
    figures = f"{_figures(comparison)}{f' · {duration(time)}' if time else ''}"
    return row(name(comparison.b), figures, factor_row(axis, shown))


def _not_compared(comparison: Comparison) -> str:
    failure = comparison.b.failure
    return row(name(comparison.b), "", note=f"{capitalized(failure)}." if failure else "Not comparable.")
