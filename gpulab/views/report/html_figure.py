"""The picture of a run as HTML, for notebooks and pages: a typical step, the steps over time, the device's curve."""

from __future__ import annotations

import numpy as np

from gpulab.analysis.facts import Facts, is_long_enough
from gpulab.formatting import duration, percent, time_unit
from gpulab.views import curves, html_bars, wording
from gpulab.views.html_bars import Segment
from gpulab.views.report import step_bars
from gpulab.views.report.sections import has_no_step
from gpulab.views.wording import plain

_MOST_POINTS = 200
LATE = 0.2  # of the run before its first step: imports, say
REST = "the rest of the step"
_LEAST = 0.01  # of the step: less stands in the table, not in the legend


def picture(facts: Facts) -> str:
    """The picture; empty where nothing was measured that it could show."""
    parts = [_step(facts), _steps(facts), _curve(facts)]
    inside = "".join(part for part in parts if part)
    return f'<div style="margin:10px 0 4px">{inside}</div>' if inside else ""


def segments(facts: Facts) -> tuple[Segment, ...]:
    """Where a typical step's time goes, the largest part first."""
    shares = facts.shares
    if shares is None or facts.few_steps is not None:
        return ()
    ordered = sorted((p for p in wording.PARTS if shares.share[p] > 0), key=lambda part: -shares.share[part])
    parts = tuple(_segment(facts, part, shares.share[part]) for part in ordered)
    if not shares.undivided:
        return parts
    return (*parts, Segment(REST, shares.undivided, wording.NOT_PROFILED.colour, percent(shares.undivided)))


def _segment(facts: Facts, part: str, share: float) -> Segment:
    look = wording.PARTS[part] if facts.breakdown is None else wording.part_of(part, facts.breakdown)
    return Segment(look.label, share, look.colour, percent(share), bool(look.hatch))


def _step(facts: Facts) -> str:
    parts = segments(facts)
    if not parts:
        return ""
    named = [part for part in parts if part.share >= _LEAST]
    return f"{html_bars.caption(title(facts))}{html_bars.bar(parts)}{html_bars.legend(named)}"


def title(facts: Facts) -> str:
    """What the bar of a typical step shows."""
    account, step = facts.breakdown, facts.typical_step_us
    if account is not None and account.whole_window:
        return "Breakdown of the traced time"
    of = "mean" if facts.whole_window else "median"
    typical = f"Step breakdown, {of} {duration(step.median)}" if step is not None else "Step breakdown"
    if account is None:
        return f"{typical} (no trace: only data wait is known)"
    return typical


def _steps(facts: Facts) -> str:
    """One bar per step, or the mean of a few; what is higher than the frame is cut, and said so."""
    if has_no_step(facts.run) or len(facts.run.steps) < 2:
        return ""
    bars = step_bars.bars(facts)
    begin_s, end_s = (ns / 1e9 for ns in shown_ns(facts))
    highest, top = float(bars.height_ms.max()), bars.top_ms
    stacks = [(html_bars.part_colour(name), ms) for name, ms in bars.parts_ms.items() if ms.any()]
    scale_us, unit = time_unit(top * 1e3)
    high = f"y-max {top * 1e3 / scale_us:.3g} {unit}"
    cut = f"; the highest, {duration(highest * 1e3)}, is cut" if highest > top else ""
    each = "one bar per step" if bars.per_bar == 1 else f"each bar is the mean of up to {bars.per_bar:,}"
    grey = "; grey: no trace" if not all(bars.profiled) else ""
    width_s = end_s - begin_s
    left, right = (bars.left_s - begin_s) / width_s, (bars.right_s - begin_s) / width_s
    svg = html_bars.columns(left, right, stacks, top or 1.0)
    return html_bars.panel(
        svg, f"Step time over the run: {len(facts.run.steps):,} steps, {each} ({high}{cut}{grey})", _end(facts)
    )


def _curve(facts: Facts) -> str:
    """The first curve of the device, in percent of what it can be."""
    shown = curves.of_device(facts.run.samples)[0][:1]
    if not shown or not is_long_enough(shown[0]):
        return ""
    series = shown[0]
    begin_ns, end_ns = shown_ns(facts)
    t_ns, _, mean, _ = curves.at_most(series, _MOST_POINTS)
    within = t_ns >= begin_ns
    if not within.any():
        return ""
    t_ns, value = t_ns[within], mean[within] * curves.percent_scale(series)
    top = max(100.0, float(np.nanmax(value)))
    svg = html_bars.line((t_ns - begin_ns) / (end_ns - begin_ns), value / top, html_bars.BLUE)
    return html_bars.panel(svg, f"{plain(series.label)}, 0 to {top:.0f} %", "" if len(facts.run.steps) else _end(facts))


def shown_ns(facts: Facts) -> tuple[int, int]:
    """The time that the drawings show: all of the run, or from its first step on where that begins late."""
    steps, wall_ns = facts.run.steps, max(facts.run.wall_ns, 1)
    first_ns = int(steps.start_ns[0]) if len(steps) else 0
    return (first_ns if LATE * wall_ns < first_ns < wall_ns else 0), wall_ns


def _end(facts: Facts) -> str:
    begin_ns, _ = shown_ns(facts)
    begin = f"the first step, {duration(begin_ns / 1e3)} after the start," if begin_ns else "the start"
    return f"from {begin} to the end"
