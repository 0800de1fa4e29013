"""The picture of a run: a typical step, its steps over time and the curves of its device, as data and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from markupsafe import Markup
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from gpulab.analysis.breakdown import StepParts
from gpulab.analysis.facts import Facts, has_no_step, is_long_enough
from gpulab.formatting import duration, number, percent, time_unit
from gpulab.run import Float64, Int64, Series
from gpulab.views import wording
from gpulab.views.bars import BLUE, Path, Segment, area_path, line_path
from gpulab.views.page import render
from gpulab.views.wording import plain

_GAP = 6  # times the usual distance between readings: over a longer gap, no line is drawn
PERCENT, MEMORY = ("_pct", "_fraction"), ("_bytes",)  # endings of the names of curves
_SCALES = {"_fraction": 100.0, "_bytes": 2.0**-30}


def at_most(series: Series, most: int) -> tuple[Float64, Float64]:
    """Time and mean of at most about `most` groups of neighbouring readings.

    A NaN marks a gap in the readings, so that no straight line is drawn for a meter that died.
    """
    t, value = series.t_ns.astype(np.float64), series.value.astype(np.float64)
    distance = np.diff(t)
    holes = np.flatnonzero(distance > _GAP * np.median(distance)) + 1 if len(t) > 2 else np.empty(0, np.int64)
    edges = np.unique(np.concatenate([[0], holes, [len(t)]]))
    per_group = -(-len(t) // most)
    first = np.concatenate([np.arange(a, b, per_group) for a, b in pairwise(edges)])
    count = np.diff(np.append(first, len(t)))
    times, means = np.add.reduceat(t, first) / count, np.add.reduceat(value, first) / count
    at = np.searchsorted(first, holes)
    return np.insert(times, at, times[at]), np.insert(means, at, np.nan)


class Line(Struct, frozen=True):
    """A curve; NaN breaks it. In a stacked chart: the height from each x on, added on top of the previous lines."""

    label: str
    colour: str
    x: Float64
    y: Float64
    dashed: bool = False  # so that an equal line below stays visible


class Chart(Struct, frozen=True, rename="camel"):
    """Lines over an axis from 0 to `x_end`; charts with one `x_unit` share their cursor.

    A page has a chart as SVG, a live bench draws the same data with a cursor, `plot()` uses matplotlib.
    """

    title: str
    below: str  # at the right end of the axis
    x_unit: str
    x_end: float
    unit: str
    low: float
    top: float
    lines: tuple[Line, ...]
    stacked: bool = False
    height_px: int = 110

    @property
    def paths(self) -> list[Path]:
        """The lines as SVG paths; if stacked, the highest sum first, so that each lower one is drawn over it."""
        high = self.top - self.low
        x = [line.x / self.x_end for line in self.lines]
        if self.stacked:
            sums = np.minimum(np.cumsum([line.y for line in self.lines], axis=0) / high, 1.0)
            return [area_path(x[i], sums[i], self.lines[i].colour) for i in reversed(range(len(x)))]
        y = [(line.y - self.low) / high if high else line.y * 0 + 0.5 for line in self.lines]
        return [line_path(x[i], y[i], line.colour, dashed=line.dashed) for i, line in enumerate(self.lines)]

    def data(self) -> dict[str, object]:
        """Plain values for the front end."""
        chart: dict[str, object] = to_builtins(self, enc_hook=_short)
        return chart


def _short(column: Float64) -> list[float | None]:
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in column.tolist()]


MOST_BARS = 150
REST = "rest"  # of a step, apart from its wait for data: only profiled steps show its parts
_PAUSE = 0.02  # share of the run: a bar ends at a longer pause between steps
_BROAD = 0.01  # share of the axis: a shorter pause between two bars is not drawn
_NARROWEST = 0.0008  # share of the axis: a bar before a pause


class StepBars(Struct, frozen=True):
    """Bars in order of time. `parts_ms` are means over the steps of a bar; `per_bar` is the most steps in one bar."""

    left_s: Float64
    right_s: Float64
    parts_ms: dict[str, Float64]
    profiled: np.ndarray
    per_bar: int

    @property
    def height_ms(self) -> Float64:
        """The full height of each bar: its steps' mean wall time."""
        height: Float64 = np.sum(list(self.parts_ms.values()), axis=0)
        return height

    @property
    def grey(self) -> str:
        """The words that explain grey bars; empty without grey bars."""
        return "" if self.profiled.all() else "; grey: no trace"

    @property
    def top_ms(self) -> float:
        """The highest bar, or less if a few outliers would make the others look flat."""
        usual, highest = float(np.percentile(self.height_ms, 90)), float(self.height_ms.max())
        return highest if highest <= 2.5 * usual else 1.5 * usual


def binned_steps(facts: Facts, until_ns: int | None = None) -> StepBars:
    """The steps that began before `until_ns` as at most some 150 bars; profiled ones are never averaged with others."""
    steps = facts.run.steps
    count = len(steps) if until_ns is None else int(np.searchsorted(steps.start_ns, until_ns))
    parts = {name: ns[:count] for name, ns in _parts_ns(facts).items()}
    profiled = np.isin(steps.number[:count], [s.number for s in profiled_steps(facts)])
    per_bar = max(1, -(-count // MOST_BARS))
    start_ns, end_ns = (ns[:count] for ns in _windows(facts))
    pause = np.concatenate([[0], start_ns[1:] - end_ns[:-1]]) > _PAUSE * facts.run.wall_ns
    # the row at which each bar begins: after every `per_bar` steps, a change of profiling, or a pause
    change = np.flatnonzero(pause | (np.diff(profiled, prepend=profiled[0]) != 0))
    edges = np.unique(np.concatenate([[0], change, [len(profiled)]]))
    first = np.concatenate([np.arange(a, b, per_bar) for a, b in pairwise(edges)])
    last = np.append(first[1:], count) - 1
    per = last - first + 1
    return StepBars(
        left_s=start_ns[first] / 1e9,
        right_s=end_ns[last] / 1e9,
        parts_ms={name: np.add.reduceat(ns, first) / per / 1e6 for name, ns in parts.items()},
        profiled=profiled[first],
        per_bar=int(per.max()),
    )


def profiled_steps(facts: Facts) -> tuple[StepParts, ...]:
    """The steps with full parts; a window that is accounted as a whole is not a step of the run."""
    return () if facts.breakdown is None or facts.breakdown.whole_window else facts.breakdown.steps


def _windows(facts: Facts) -> tuple[Int64, Int64]:
    """Begin and end of each step; for a profiled step, of the device's work for it."""
    steps = facts.run.steps
    start_ns, end_ns = steps.start_ns.copy(), steps.end_ns.copy()
    for step in profiled_steps(facts):
        row = steps.number == step.number
        start_ns[row], end_ns[row] = step.start_ns, step.end_ns
    return start_ns, end_ns


def _parts_ns(facts: Facts) -> dict[str, Int64]:
    """One column of nanoseconds per part; unprofiled steps have only data wait and the rest."""
    steps = facts.run.steps
    parts = {name: np.zeros(len(steps), np.int64) for name in wording.PARTS}
    wait = np.minimum(steps.data_wait_ns, steps.time_ns)
    parts["data_wait"][:] = wait
    parts[REST] = steps.time_ns - wait
    for step in profiled_steps(facts):
        row = steps.number == step.number
        parts[REST][row] = 0
        for name, ns in step.parts_ns.items():
            parts[name][row] = ns
    return parts


_MOST_POINTS = 200
LATE = 0.2  # share of the run before its first step, e.g. imports
REST_LABEL = "the rest of the step"
_LEAST = 0.01  # share of the step: a smaller part is in the table, not in the legend


def picture(facts: Facts) -> Markup:
    """The picture; empty if nothing was measured that it could show."""
    parts = segments(facts)
    in_legend = [part for part in parts if part.share >= _LEAST]
    charts = [chart for chart in (steps_over_time(facts), device_curves(facts)) if chart is not None]
    return render("run.html", title=title(facts), parts=parts, in_legend=in_legend, charts=charts)


def segments(facts: Facts) -> list[Segment]:
    """Where a typical step's time goes, the largest part first."""
    shares = facts.shares
    if shares is None or facts.few_steps is not None:
        return []
    parts = []
    for name in sorted((p for p in wording.PARTS if shares.share[p] > 0), key=lambda kind: -shares.share[kind]):
        kind = wording.PARTS[name] if facts.breakdown is None else wording.part_of(name, facts.breakdown)
        share = shares.share[name]
        parts.append(Segment(kind.label, share, kind.colour, percent(share), bool(kind.hatch)))
    if shares.undivided:
        grey = wording.NOT_PROFILED.colour
        parts.append(Segment(REST_LABEL, shares.undivided, grey, percent(shares.undivided)))
    return parts


def title(facts: Facts) -> str:
    """The title above the bar of a typical step."""
    account, step = facts.breakdown, facts.typical_step_us
    if account is not None and account.whole_window:
        return "Breakdown of the traced time"
    of = "mean" if facts.whole_window else "median"
    typical = f"Step breakdown, {of} {duration(step.median)}" if step is not None else "Step breakdown"
    return typical if account is not None else f"{typical} (no trace: only data wait is known)"


def steps_over_time(facts: Facts) -> Chart | None:
    """One bar per step, or per mean of a few steps; bars higher than the frame are cut, and a text says so."""
    if has_no_step(facts.run) or len(facts.run.steps) < 2:
        return None
    binned = binned_steps(facts)
    top_us, highest_us = 1e3 * binned.top_ms, 1e3 * float(binned.height_ms.max())
    scale_us, unit = time_unit(top_us)
    cut = f"; the highest, {duration(highest_us)}, is cut" if highest_us > top_us else ""
    each = "one bar per step" if binned.per_bar == 1 else f"each bar is the mean of up to {binned.per_bar:,}"
    y_axis = f"y-max {top_us / scale_us:.3g} {unit}{cut}{binned.grey}"
    words = f"Step time over the run: {len(facts.run.steps):,} steps, {each} ({y_axis})"
    return steps_chart(binned, *time_range_ns(facts), binned.top_ms, words, _end(facts), 84)


def steps_chart(
    binned: StepBars, begin_ns: int, end_ns: int, top_ms: float, title: str, below: str, height_px: int
) -> Chart:
    """Bars as outlines: each keeps its height until the next begins, and drops to 0 during a pause."""
    end_s = (end_ns - begin_ns) / 1e9
    left_s, right_s = (side - begin_ns / 1e9 for side in (binned.left_s, binned.right_s))
    pause = np.append(left_s[1:] - right_s[:-1] > _BROAD * end_s, True)
    ends_s = np.maximum(right_s, left_s + _NARROWEST * end_s)[pause]
    order = np.argsort(np.concatenate([np.arange(len(left_s)), np.flatnonzero(pause) + 0.5]), kind="stable")
    edges = np.maximum.accumulate(np.clip(np.concatenate([left_s, ends_s])[order], 0, end_s))
    parts = [(wording.PARTS.get(name, wording.NOT_PROFILED), ms) for name, ms in binned.parts_ms.items() if ms.any()]
    lines = tuple(
        Line(part.label, part.colour, edges, np.concatenate([ms, np.zeros(len(ends_s))])[order]) for part, ms in parts
    )
    return Chart(title, below, "s", end_s, "ms", 0.0, top_ms or 1.0, lines, stacked=True, height_px=height_px)


def device_curves(facts: Facts, kinds: tuple[str, ...] = PERCENT, most: int = 1) -> Chart | None:
    """The first `most` curves whose names have one of these endings: percentages, or memory in GiB."""
    begin_ns, end_ns = time_range_ns(facts)
    series = [one for one in facts.run.samples.series if one.name.endswith(kinds) and is_long_enough(one)]
    lines = [line for one in series if (line := curve(one, begin_ns, end_ns))][:most]
    if not lines:
        return None
    name, below = lines[0].label if len(lines) == 1 else "Device", "" if len(facts.run.steps) else _end(facts)
    return curves_chart(name, lines, end_ns - begin_ns, below, "%" if kinds == PERCENT else "GiB")


def curve(series: Series, begin_ns: int, end_ns: int) -> Line | None:
    """The readings within a part of a run, in percent or GiB; None without readings."""
    within = (series.t_ns >= begin_ns) & (series.t_ns <= end_ns)
    t_ns, value = series.t_ns[within] - begin_ns, series.value[within]
    if not np.isfinite(value).any():
        return None
    scale = next((scale for kind, scale in _SCALES.items() if series.name.endswith(kind)), 1.0)
    times_ns, means = at_most(replace(series, t_ns=t_ns, value=value), _MOST_POINTS)
    return Line(series.label, BLUE, times_ns / 1e9, means * scale)


def curves_chart(name: str, lines: Sequence[Line], end_ns: int, below: str = "", unit: str = "%") -> Chart:
    """Curves on one axis from 0 on."""
    highest = max(float(np.nanmax(line.y)) for line in lines)
    top = max(100.0, highest) if unit == "%" else 1.1 * highest or 1.0
    title = f"{plain(name)}, 0 to {number(top)} {unit}"
    return Chart(title, below, "s", end_ns / 1e9, unit, 0.0, top, tuple(lines), height_px=48)


def time_range_ns(facts: Facts) -> tuple[int, int]:
    """Begin and end of the time axis: the whole run, or from its first step on if that step begins late."""
    steps, wall_ns = facts.run.steps, max(facts.run.wall_ns, 1)
    first_ns = int(steps.start_ns[0]) if len(steps) else 0
    return (first_ns if LATE * wall_ns < first_ns < wall_ns else 0), wall_ns


def _end(facts: Facts) -> str:
    begin_ns, _ = time_range_ns(facts)
    begin = f"the first step, {duration(begin_ns / 1e3)} after the start," if begin_ns else "the start"
    return f"from {begin} to the end"
