"""Two runs of one cell in full, drawn on the same axes: where a step goes, steps over time, the device, the losses,
the operators, the settings.

A pure function of both rows and their runs; what one of them has not is left out, and what neither has is not drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gpulab.analysis.facts import Facts
from gpulab.analysis.operators import CostRow
from gpulab.formatting import duration, gib, number, percent, speedup
from gpulab.run import Float64
from gpulab.tuning.bench import Row, Speed
from gpulab.tuning.record import BASELINE
from gpulab.views import curves, html_bars, html_rows
from gpulab.views.bench import run_words, time_title
from gpulab.views.html import fragment_section
from gpulab.views.html_bars import Segment
from gpulab.views.html_rows import A_COLOUR, B_COLOUR, key, picture
from gpulab.views.layout import Column, Section, numbers
from gpulab.views.report import step_bars
from gpulab.views.report.sections import without_parts
from gpulab.views.wording import effect, operator_name, plain

_OPERATORS, _POINTS = 8, 300
_HIGH_PX = 64


def sentence(a: Row, b: Row, speed: Speed | None) -> str:
    """B against A, verdict first."""
    if b.failure or a.failure:
        failed = b if b.failure else a
        return f"{failed.title} could not be measured: {failed.failure}."
    of_a, of_b = (f"the {BASELINE}" if row.title == BASELINE else row.title for row in (a, b))
    if speed is None or speed.times_as_fast is None:
        return f"No comparison of {of_b} and {of_a}."
    figures = speedup(speed.times_as_fast, speed.times_as_fast_interval, ("{}", ""))
    figures += " per sample" if speed.per == "sample" else ""
    how = {
        "faster": f"{of_b} is faster than {of_a}: speedup {figures}",
        "slower": f"{of_b} is slower than {of_a}: speedup {figures}",
        "no measurable difference": f"No measurable difference between {of_b} and {of_a}: {figures}",
    }
    return f"{how.get(speed.verdict, f'Undecided between {of_b} and {of_a}: {figures} so far')}."


def fragment(a: Row, b: Row, of_a: Facts | None, of_b: Facts | None, speed: Speed | None) -> str:
    """All of it as HTML with inline styles; only what stands in the rows where a run is gone."""
    title = f'<div class="gp-sentence">{html_bars.safe(sentence(a, b, speed))}</div>'
    gone = [row.title for row, figures in ((a, of_a), (b, of_b)) if figures is None and not row.failure]
    note = (
        f'<p class="gp-quiet">The full run of {html_bars.safe(" and ".join(gone))} is no longer stored.</p>'
        if gone
        else ""
    )
    apart = "".join(html_bars.caption(f"{row.title}: {said}.") for row in (a, b) if (said := run_words(row)))
    return title + note + apart + drawn(a, b, of_a, of_b, speed) + fragment_section(_figures(a, b))


def drawn(a: Row, b: Row, of_a: Facts | None, of_b: Facts | None, speed: Speed | None) -> str:
    """What is drawn of both on one axis each, and their operators."""
    parts = [_times(a, b, per_sample=speed is not None and speed.per == "sample")]
    if of_a is not None and of_b is not None:
        parts += [_steps(of_a, of_b), _device_curves(of_a, of_b)]
    parts.append(_losses(a, b))
    operators = _operators(of_a, of_b) if of_a is not None and of_b is not None else None
    return "".join(parts) + (fragment_section(operators) if operators is not None else "")


def _times(a: Row, b: Row, *, per_sample: bool) -> str:
    """Both times as bars on one axis, divided by their parts."""
    both = [(f"{mark}: {row.title}", row, row.step_us) for mark, row in (("A", a), ("B", b))]
    per_sample = per_sample and all(row.samples_per_step for row in (a, b))
    shown = [
        (name, row.shares, us / (row.samples_per_step or 1.0) if per_sample else us) for name, row, us in both if us
    ]
    longest_us = max((us for _, _, us in shown), default=0.0)
    bars = [
        html_rows.row(name, duration(us), html_bars.bar(segments(shares, us, longest_us), height_px=16))
        for name, shares, us in shown
    ]
    legend = html_bars.parts_legend(shares for _, shares, _ in shown)
    blocks = " in interleaved blocks" if a.by_blocks and b.by_blocks else ""
    title = f"Time per {'sample' if per_sample else 'step'}{blocks}"
    title += "; split as in one profiled run each" if legend else ""
    return picture(html_bars.caption(title), *bars, legend) if bars else ""


def segments(shares: Mapping[str, float], us: float, longest_us: float) -> list[Segment]:
    """The parts of a time, as long as it is of the longest; grey where none is known."""
    whole = [Segment("", us / longest_us, html_bars.GREY, duration(us))]
    return html_bars.of_parts(shares, lambda share: duration(share * us), us / longest_us) or whole


def _device_curves(of_a: Facts, of_b: Facts) -> str:
    """How busy the device was in the profiled run of each; empty where that was read of neither."""
    for kind in ("gpu_utilization_pct", "cpu_pct"):
        readings = [(one.run.samples.get(kind), colour) for one, colour in ((of_a, A_COLOUR), (of_b, B_COLOUR))]
        shown = [(series, colour) for series, colour in readings if series is not None and curves.has_readings(series)]
        if shown:
            break
    else:
        return ""
    end_ns = max(float(series.t_ns[-1]) for series, _ in shown) or 1.0
    top = max(100.0, curves.highest([series for series, _ in shown]))
    lines = []
    for series, colour in shown:
        t_ns, _, mean, _ = curves.at_most(series, _POINTS)
        lines.append((t_ns / end_ns, mean / top, colour))
    title = f"{plain(shown[0][0].label)}, 0 to {top:.0f} %, in one profiled run of each"
    panel = html_bars.panel(html_bars.lines(lines), title, duration(end_ns / 1e3))
    return picture(panel, key([(A_COLOUR, "A"), (B_COLOUR, "B")]))


def _steps(of_a: Facts, of_b: Facts) -> str:
    """The steps of both over one time axis, from each one's first step on, under one y-max."""
    both = [(mark, figures) for mark, figures in (("A", of_a), ("B", of_b)) if len(figures.run.steps) > 1]
    if not both:
        return ""
    charts = [(mark, step_bars.bars(figures)) for mark, figures in both]
    top_ms = max(bars.top_ms for _, bars in charts)
    spans_s = [float(bars.right_s[-1] - bars.left_s[0]) for _, bars in charts]
    longest_s = max(spans_s)
    drawn = "".join(
        html_bars.panel(
            html_bars.columns(
                (bars.left_s - bars.left_s[0]) / longest_s,
                (bars.right_s - bars.left_s[0]) / longest_s,
                [(html_bars.part_colour(name), ms) for name, ms in bars.parts_ms.items() if ms.any()],
                top_ms,
                _HIGH_PX,
            ),
            f"{mark}: {len(figures.run.steps):,} steps (grey: no trace)",
            "",
        )
        for (mark, figures), (_, bars) in zip(both, charts, strict=True)
    )
    limits = html_bars.caption(f"Step time over the run; y-max {duration(top_ms * 1e3)}, both on one time axis")
    return picture(limits, drawn)


def _losses(a: Row, b: Row) -> str:
    """Both losses over the samples that the model was shown; over steps where their number is not known."""
    values = [np.array([np.nan if x is None else x for x in row.losses], np.float64) for row in (a, b)]
    finite = np.concatenate([curve[np.isfinite(curve)] for curve in values])
    if not len(finite):
        return ""
    low, high = float(finite.min()), float(finite.max())
    unit = "samples" if all(row.samples_per_step for row in (a, b)) else "steps"
    ends = [
        (row.loss_steps or len(row.losses)) * ((row.samples_per_step or 1.0) if unit == "samples" else 1.0)
        for row in (a, b)
    ]
    longest = max(ends)
    lines = [
        (np.linspace(0, end / longest, len(curve), endpoint=False), _within(curve, low, high), colour)
        for curve, end, colour in zip(values, ends, (A_COLOUR, B_COLOUR), strict=True)
    ]
    title = f"Loss over {unit}, from {low:.4g} to {high:.4g}"
    panel = html_bars.panel(html_bars.lines(lines), title, f"{longest:,.0f} {unit}")
    return picture(panel, key([(A_COLOUR, f"A: {a.title}"), (B_COLOUR, f"B: {b.title}")]))


def _within(curve: Float64, low: float, high: float) -> Float64:
    return (curve - low) / (high - low) if high > low else curve * 0 + 0.5


def _figures(a: Row, b: Row) -> Section:
    rows = [
        ("settings", a.label, b.label),
        (time_title((a, b)).lower(), *(duration(row.step_us) if row.step_us else "–" for row in (a, b))),
        ("samples/s", *(number(row.samples_per_s) if row.samples_per_s else "–" for row in (a, b))),
        ("peak memory", *(gib(row.memory_bytes) if row.memory_bytes else "–" for row in (a, b))),
        ("took effect", *("; ".join(f"{c.name}: {effect(c)}" for c in row.checks) or "–" for row in (a, b))),
    ]
    shown = [cells for cells in rows if set(cells[1:]) != {"–"}]
    both = (("A", a), ("B", b))
    lines = [f"Loss of {m} against the baseline: {plain(row.loss_words)}." for m, row in both if row.loss_words]
    return Section.table("Figures", [Column(""), Column("A", "wrap"), Column("B", "wrap")], shown, lines)


def _operators(of_a: Facts, of_b: Facts) -> Section | None:
    """The operators that take most of a step on either side, as shares: the traced runs are slower than the blocks."""
    both = [{row.name: row for row in without_parts(figures.operators)} for figures in (of_a, of_b)]
    names = sorted({*both[0], *both[1]}, key=lambda name: -max(_share(side.get(name)) for side in both))[:_OPERATORS]
    if not names:
        return None
    cells = [(operator_name(name), *_operator_cells([side.get(name) for side in both])) for name in names]
    title = "Top operators, share of a traced step"
    return Section.table(title, [Column(""), *numbers("A", "B", "difference")], cells)


def _operator_cells(rows: Sequence[CostRow | None]) -> tuple[str, str, str]:
    of_a, of_b = (_share(row) for row in rows)
    a, b = (percent(row.share) if row is not None else "–" for row in rows)
    return a, b, f"{100 * (of_b - of_a):+.1f} points"


def _share(row: CostRow | None) -> float:
    return 0.0 if row is None else row.share
