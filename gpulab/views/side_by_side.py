"""Two runs of one cell in full, drawn on the same axes: where a step goes, steps over time, the device, the losses,
the operators, the settings and the edit between them.

A pure function of both rows and their runs; what one of them has not is left out, and what neither has is not drawn.
Tables are HTML from here alone: a saved notebook has them without a script, and a second renderer would differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from msgspec.structs import replace

from gpulab.analysis.facts import Facts
from gpulab.formatting import capitalized, duration, gib, number, speedup
from gpulab.run import Change
from gpulab.tuning.bench import Row, cost_of_row
from gpulab.tuning.record import BASELINE, Speed
from gpulab.views import run_figure
from gpulab.views.bars import A_COLOUR, B_COLOUR, Segment, of_parts, parts_key
from gpulab.views.bench import run_words, time_title
from gpulab.views.html import macros
from gpulab.views.layout import Column, Section, numbers, present
from gpulab.views.report.sections import without_parts
from gpulab.views.run_figure import Chart, Line
from gpulab.views.wording import NOT_PROFILED, effect, operator_name, plain

_OPERATORS = 8
_LONGER = 5  # times the shorter run: what the longer one did after that is not drawn
_HIGH_PX = 64


def sentence(a: Row, b: Row, speed: Speed | None) -> str:
    """B against A, verdict first."""
    if b.failure or a.failure:
        failed = b if b.failure else a
        return f"{failed.title} could not be measured: {failed.failure}."
    of_a, of_b = (f"the {BASELINE}" if row.title == BASELINE else row.title for row in (a, b))
    if speed is None or speed.times_as_fast is None:
        why = ": each was measured against the baseline of another text of the cell" if a.code != b.code else ""
        if not why and a.speed is not None and b.speed is not None and a.speed.unit != b.speed.unit:
            why = f": {of_a} was measured per {a.speed.unit}, {of_b} per {b.speed.unit}"
        return f"No comparison of {of_b} and {of_a}{why}."
    figures = speedup(speed.times_as_fast, speed.times_as_fast_interval, ("{}", ""))
    figures += " per sample" if speed.unit == "sample" else ""
    how = {
        "faster": f"{of_b} is faster than {of_a}: speedup {figures}",
        "slower": f"{of_b} is slower than {of_a}: speedup {figures}",
        "no measurable difference": f"No measurable difference between {of_b} and {of_a}: {figures}",
    }
    cost = cost_of_row(a, replace(b, speed=speed))
    takes = f" {capitalized(cost.words)}." if cost is not None and speed.verdict in ("faster", "slower") else ""
    undecided = f"Undecided between {of_b} and {of_a}: {figures}{'' if speed.interval else ' so far'}"
    return f"{how.get(speed.verdict, undecided)}.{takes}"


def fragment(a: Row, b: Row, of_a: Facts | None, of_b: Facts | None, speed: Speed | None, edit: str = "") -> str:
    """All of it as HTML with inline styles; only what stands in the rows where a run is gone. `edit` is from A to B."""
    whole = macros("side_by_side.html").whole(
        sentence(a, b, speed),
        " and ".join(row.title for row, figures in ((a, of_a), (b, of_b)) if figures is None and not row.failure),
        [f"{row.title}: {said}." for row in (a, b) if (said := run_words(row))],
        drawn(a, b, of_a, of_b, speed, _figures(a, b)),
        Section("Code, from A to B", code=edit) if edit else None,
    )
    return str(whole)


def drawn(
    a: Row, b: Row, of_a: Facts | None, of_b: Facts | None, speed: Speed | None, figures: Section | None = None
) -> Markup:
    """What is drawn of both on one axis each, their operators and `figures`: abreast where there is room."""
    per_sample = speed is not None and speed.unit == "sample" and all(row.samples_per_step for row in (a, b))
    operators = None
    if of_a is not None and of_b is not None and not (a.no_shares_reason or b.no_shares_reason):
        operators = _operators((a, of_a), (b, of_b), per_sample=per_sample)
    shown = charts(a, b, of_a, of_b)
    picture: Markup = macros("side_by_side.html").drawn(
        _times(a, b, per_sample=per_sample),
        [chart for chart in shown if chart.x_unit == "s"],
        [chart for chart in shown if chart.x_unit != "s"],
        [Segment("A", 0, A_COLOUR), Segment("B", 0, B_COLOUR)],
        present(operators, figures),
    )
    return picture


def charts(a: Row, b: Row, of_a: Facts | None, of_b: Facts | None) -> tuple[Chart, ...]:
    """The steps of each and their device, and both losses, as they stand in the HTML; without what was not measured."""
    over_time = _over_time(of_a, of_b) if of_a is not None and of_b is not None else []
    loss = _losses(a, b)
    return (*over_time, *([loss] if loss is not None else []))


def _times(a: Row, b: Row, *, per_sample: bool) -> dict[str, object]:
    """Both times as bars on one axis, divided by their parts; grey where none is known."""
    shown = [
        (f"{mark}: {row.title}", row.shares, row.step_us / ((row.samples_per_step or 1.0) if per_sample else 1.0))
        for mark, row in (("A", a), ("B", b))
        if row.step_us
    ]
    longest_us = max((us for *_, us in shown), default=0.0)
    blocks = " in interleaved blocks" if a.by_blocks and b.by_blocks else ""
    key = parts_key(shares for _, shares, _ in shown)
    split = "; split as in one traced run each" if key else ""
    return {
        "title": f"Time per {'sample' if per_sample else 'step'}{blocks}{split}",
        "bars": [(name, duration(us), segments(shares, us, longest_us)) for name, shares, us in shown],
        "key": key,
        "without": [f"{row.title}: no breakdown: {row.no_shares_reason}." for row in (a, b) if row.no_shares_reason],
    }


def segments(shares: Mapping[str, float], us: float, longest_us: float) -> list[Segment]:
    """The parts of a time, as long as it is of the longest; grey where none is known."""
    whole = [Segment("", us / longest_us, NOT_PROFILED.colour, duration(us))]
    return of_parts(shares, lambda share: duration(share * us), us / longest_us) or whole


def _over_time(of_a: Facts, of_b: Facts) -> list[Chart]:
    """On one axis, from each one's first step on, as far as both can be seen where one is much longer."""
    both = [("A", A_COLOUR, of_a), ("B", B_COLOUR, of_b)]
    spans_ns = [int(f.run.steps.end_ns[-1] - f.run.steps.start_ns[0]) for _, _, f in both if len(f.run.steps) > 1]
    if not spans_ns:
        return []
    end_ns = min(max(spans_ns), _LONGER * min(spans_ns))
    binned = [
        (mark, f, run_figure.binned_steps(f, _first_ns(f) + end_ns)) for mark, _, f in both if len(f.run.steps) > 1
    ]
    top_ms = max(bars.top_ms for *_, bars in binned) or 1.0
    below, device = f"{duration(end_ns / 1e3)} from the first step on", _device(both, end_ns)
    shown = []
    for mark, f, bars in binned:
        count, whole_us = len(f.run.steps), (f.run.steps.end_ns[-1] - f.run.steps.start_ns[0]) / 1e3
        part = f", the first {duration(end_ns / 1e3)} of" if 1e3 * whole_us > end_ns else " in"
        title = f"Step time over the run, {mark}: {count:,} steps{part} {duration(whole_us)}"
        title += f" (y-max {duration(top_ms * 1e3)}{bars.grey})"
        under = below if device is None and f is binned[-1][1] else ""
        begin_ns = _first_ns(f)
        shown.append(run_figure.steps_chart(bars, begin_ns, begin_ns + end_ns, top_ms, title, under, _HIGH_PX))
    return [*shown, replace(device, below=below)] if device is not None else shown


def _first_ns(figures: Facts) -> int:
    return int(figures.run.steps.start_ns[0]) if len(figures.run.steps) else 0


def _device(both: Sequence[tuple[str, str, Facts]], end_ns: int) -> Chart | None:
    """How busy the device was in the traced run of each; None where that was read of neither."""
    for kind in ("gpu_utilization_pct", "cpu_pct"):
        curves = [
            (series.label, replace(line, label=mark, colour=colour))
            for mark, colour, f in both
            if (series := f.run.samples.get(kind)) is not None
            and (line := run_figure.curve(series, _first_ns(f), _first_ns(f) + end_ns)) is not None
        ]
        if curves:
            chart = run_figure.curves_chart(curves[0][0], [line for _, line in curves], end_ns)
            return replace(chart, title=f"{chart.title}, in one traced run of each", height_px=_HIGH_PX)
    return None


def _losses(a: Row, b: Row) -> Chart | None:
    """Both losses over the samples that the model was shown; over steps where their number is not known."""
    both = [
        (mark, colour, row) for mark, colour, row in zip("AB", (A_COLOUR, B_COLOUR), (a, b), strict=True) if row.losses
    ]
    unit = "samples" if all(row.samples_per_step for *_, row in both) else "steps"
    lines, ends = [], {}
    for mark, colour, row in both:
        per_step = (row.samples_per_step or 1.0) if unit == "samples" else 1.0
        ends[mark] = (row.loss_steps or len(row.losses)) * per_step
        y = np.array([np.nan if loss is None else loss for loss in row.losses], np.float64)
        lines.append(Line(mark, colour, np.linspace(0, ends[mark], len(y), endpoint=False), y, dashed=mark == "B"))
    end = min(max(ends.values()), _LONGER * min(ends.values())) if ends else 0.0
    lines = [replace(line, x=line.x[line.x <= end], y=line.y[line.x <= end]) for line in lines]
    finite = [loss for line in lines for loss in line.y.tolist() if np.isfinite(loss)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    cut = "".join(f"; {mark} goes on to {last:,.0f}" for mark, last in ends.items() if last > end)
    title = f"Loss over {unit}, from {low:.4g} to {high:.4g}{cut}"
    return Chart(title, f"{end:,.0f} {unit}", unit, end, "", low, high, tuple(lines))


def _figures(a: Row, b: Row) -> Section:
    rows = [
        *_settings(a, b),
        (time_title((a, b)).lower(), *(duration(row.step_us) if row.step_us else "–" for row in (a, b))),
        ("samples/s", *(number(row.samples_per_s) if row.samples_per_s else "–" for row in (a, b))),
        ("peak memory", *(gib(row.memory_bytes) if row.memory_bytes else "–" for row in (a, b))),
    ]
    shown = [cells for cells in rows if set(cells[1:]) != {"–"}]
    lines = [
        f"Loss of {m} against the baseline: {plain(row.loss_words)}."
        for m, row in (("A", a), ("B", b))
        if row.loss_words
    ]
    columns = [Column(""), Column("A", "wrap"), Column("B", "wrap")]
    return Section.table("Settings that differ, and figures", columns, shown, lines)


def _settings(a: Row, b: Row) -> list[tuple[str, str, str]]:
    """Those that differ; of a row that leaves one alone what the other found there."""
    checks = [{check.name: check for check in row.checks} for row in (a, b)]
    values = {name: check.found for side in checks for name, check in side.items() if check.found}

    def cell(row: Row, own: Mapping[str, Change], name: str) -> str:
        if name not in row.settings:
            return values.get(name, BASELINE)
        return f"{row.settings[name]}, {effect(own[name])}" if name in own else row.settings[name]

    names = [name for name in {**a.settings, **b.settings} if a.settings.get(name) != b.settings.get(name)]
    return [(name, cell(a, checks[0], name), cell(b, checks[1], name)) for name in names]


def _operators(*both: tuple[Row, Facts], per_sample: bool) -> Section | None:
    """Those whose time differs most: among them is what the change of settings did."""
    title = f"Operators that differ most, per traced {'step, for one sample' if per_sample else 'step'}"
    bare = [mark for mark, (_, figures) in zip("AB", both, strict=True) if figures.breakdown is None]
    if bare:
        return Section(title, lines=(f"Not measurable: no traced steps in {' and '.join(bare)}.",))
    if not any(figures.operators for _, figures in both):
        return None
    on_gpu = all(any(row.device_us is not None for row in figures.operators) for _, figures in both)
    times = [dict[str, float](), dict[str, float]()]
    for us, (row, figures) in zip(times, both, strict=True):
        for cost in without_parts(figures.operators):
            own_us = (cost.device_us or 0.0) if on_gpu else cost.self_us
            name = operator_name(cost.name)
            us[name] = us.get(name, 0.0) + own_us / ((row.samples_per_step or 1.0) if per_sample else 1.0)
    of_a, of_b = times
    change = {name: of_b.get(name, 0.0) - of_a.get(name, 0.0) for name in {**of_a, **of_b}}
    names = sorted(change, key=lambda name: -abs(change[name]))[:_OPERATORS]
    cells = [
        (name, *(duration(us[name]) if name in us else "–" for us in times), _signed(change[name])) for name in names
    ]
    columns = [Column("GPU time" if on_gpu else "CPU time", "cut"), *numbers("A", "B", "difference")]
    note = "Tracing slows a step down: compare these times with each other only."
    return Section.table(title, columns, cells, [note])


def _signed(us: float) -> str:
    return f"{'+' if us > 0 else '−' if us < 0 else ''}{duration(abs(us))}"
