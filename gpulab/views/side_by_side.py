"""Two runs of one cell in full, drawn on the same axes: where a step goes, steps over time, the device, the losses,
the operators, the settings and the edit between them.

What was measured for neither run is left out. The live bench and a saved notebook show the same HTML.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from msgspec.structs import replace

from gpulab.analysis.facts import Facts
from gpulab.formatting import capitalized, duration, gib, number, speedup
from gpulab.tuning.bench import Row, cost_of_row
from gpulab.tuning.record import BASELINE, Speed
from gpulab.views import run_figure
from gpulab.views.bars import A_COLOUR, B_COLOUR, Segment, of_parts, parts_key
from gpulab.views.bench import run_words, time_title
from gpulab.views.layout import Column, Section, numbers, present
from gpulab.views.page import macros
from gpulab.views.report.sections import without_parts
from gpulab.views.run_figure import Chart, Line
from gpulab.views.wording import DASH, NOT_PROFILED, effect, operator_name, or_dash, plain

_OPERATORS = 8
_LONGER = 5  # times the shorter run: the longer run is not drawn beyond that
_HIGH_PX = 64
_SIDES = (("A", A_COLOUR), ("B", B_COLOUR))


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
    """The whole comparison as HTML with inline styles; of a deleted run, only its row. `edit`: from A to B."""
    whole = macros("side_by_side.html").whole(
        sentence(a, b, speed),
        " and ".join(row.title for row, figures in ((a, of_a), (b, of_b)) if figures is None and not row.failure),
        [f"{row.title}: {words}." for row in (a, b) if (words := run_words(row))],
        picture(a, b, of_a, of_b, speed, _figures(a, b)),
        Section("Code, from A to B", code=edit) if edit else None,
    )
    return str(whole)


def picture(
    a: Row, b: Row, of_a: Facts | None, of_b: Facts | None, speed: Speed | None, figures: Section | None = None
) -> Markup:
    """The charts of both on common axes, their operators and `figures`, in two columns if there is room."""
    per_sample = speed is not None and speed.unit == "sample" and all(row.samples_per_step for row in (a, b))
    operators = None
    if of_a is not None and of_b is not None and not (a.no_shares_reason or b.no_shares_reason):
        operators = _operators((a, of_a), (b, of_b), per_sample=per_sample)
    both_charts = charts(a, b, of_a, of_b)
    abreast: Markup = macros("side_by_side.html").abreast(
        _times(a, b, per_sample=per_sample),
        [chart for chart in both_charts if chart.x_unit == "s"],
        [chart for chart in both_charts if chart.x_unit != "s"],
        [Segment(mark, 0, colour) for mark, colour in _SIDES],
        present(operators, figures),
    )
    return abreast


def charts(a: Row, b: Row, of_a: Facts | None, of_b: Facts | None) -> tuple[Chart, ...]:
    """The measured charts in the order of the HTML: the steps of each run, the device, the losses."""
    over_time = _over_time(of_a, of_b) if of_a is not None and of_b is not None else []
    return (*over_time, *_losses(a, b))


def _divisor(row: Row, *, per_sample: bool) -> float:
    """The divisor of step times: the samples of a step, or 1."""
    return (row.samples_per_step or 1.0) if per_sample else 1.0


def _times(a: Row, b: Row, *, per_sample: bool) -> dict[str, object]:
    """Both times as bars on one axis, split into their parts; grey if the parts are unknown."""
    times_us = [(row.step_us or 0.0) / _divisor(row, per_sample=per_sample) for row in (a, b)]
    bars = [
        (f"{mark}: {row.title}", duration(us), segments(row.shares, us, max(times_us)))
        for (mark, _), row, us in zip(_SIDES, (a, b), times_us, strict=True)
        if us
    ]
    key = parts_key(row.shares for row in (a, b) if row.step_us)
    blocks = " in interleaved blocks" if a.by_blocks and b.by_blocks else ""
    split = "; split as in one traced run each" if key else ""
    return {
        "title": f"Time per {'sample' if per_sample else 'step'}{blocks}{split}",
        "bars": bars,
        "key": key,
        "without": [f"{row.title}: no breakdown: {row.no_shares_reason}." for row in (a, b) if row.no_shares_reason],
    }


def segments(shares: Mapping[str, float], us: float, longest_us: float) -> list[Segment]:
    """The parts of a time on a bar whose full width is `longest_us`; grey if the parts are unknown."""
    whole = [Segment("", us / longest_us, NOT_PROFILED.colour, duration(us))]
    return of_parts(shares, lambda share: duration(share * us), us / longest_us) or whole


def _over_time(*both: Facts) -> list[Chart]:
    """The steps of both on one axis from the first step of each; only the beginning of a much longer run."""
    steps = [figures.run.steps for figures in both]
    spans_ns = [int(s.end_ns[-1] - s.start_ns[0]) for s in steps if len(s) > 1]
    if not spans_ns:
        return []
    end_ns = min(max(spans_ns), _LONGER * min(spans_ns))
    begins_ns = [int(s.start_ns[0]) if len(s) else 0 for s in steps]
    binned = {
        mark: (figures, begin_ns, run_figure.binned_steps(figures, begin_ns + end_ns))
        for (mark, _), figures, begin_ns in zip(_SIDES, both, begins_ns, strict=True)
        if len(figures.run.steps) > 1
    }
    top_ms = max(bars.top_ms for *_, bars in binned.values()) or 1.0
    end, over_time = duration(end_ns / 1e3), []
    for mark, (figures, begin_ns, bars) in binned.items():
        ends_ns = figures.run.steps.end_ns
        whole_ns = int(ends_ns[-1]) - begin_ns
        part = f", the first {end} of" if whole_ns > end_ns else " in"
        title = f"Step time over the run, {mark}: {len(ends_ns):,} steps{part} {duration(whole_ns / 1e3)}"
        title += f" (y-max {duration(top_ms * 1e3)}{bars.grey})"
        over_time.append(run_figure.steps_chart(bars, begin_ns, begin_ns + end_ns, top_ms, title, "", _HIGH_PX))
    over_time += _device(both, begins_ns, end_ns)
    return [*over_time[:-1], replace(over_time[-1], below=f"{end} from the first step on")]


def _device(both: Sequence[Facts], begins_ns: Sequence[int], end_ns: int) -> list[Chart]:
    """How busy the device was in the traced run of each; empty if neither was measured."""
    for kind in ("gpu_utilization_pct", "cpu_pct"):
        curves = [
            (series.label, replace(line, label=mark, colour=colour))
            for (mark, colour), figures, begin_ns in zip(_SIDES, both, begins_ns, strict=True)
            if (series := figures.run.samples.get(kind)) is not None
            and (line := run_figure.curve(series, begin_ns, begin_ns + end_ns)) is not None
        ]
        if curves:
            chart = run_figure.curves_chart(curves[0][0], [line for _, line in curves], end_ns)
            return [replace(chart, title=f"{chart.title}, in one traced run of each", height_px=_HIGH_PX)]
    return []


def _losses(*rows: Row) -> list[Chart]:
    """Both losses over the training samples so far; over steps if their number is unknown."""
    both = [(*side, row) for side, row in zip(_SIDES, rows, strict=True) if row.losses]
    if not both:
        return []
    per_sample = all(row.samples_per_step for *_, row in both)
    unit = "samples" if per_sample else "steps"
    ends = {mark: (row.loss_steps or len(row.losses)) * (_divisor(row, per_sample=per_sample)) for mark, _, row in both}
    end = min(max(ends.values()), _LONGER * min(ends.values()))
    lines = []
    for mark, colour, row in both:
        x = np.linspace(0, ends[mark], len(row.losses), endpoint=False)
        y = np.array(row.losses, np.float64)  # None is NaN
        lines.append(Line(mark, colour, x[x <= end], y[x <= end], dashed=mark == "B"))
    losses = np.concatenate([line.y for line in lines])
    losses = losses[np.isfinite(losses)]
    if not len(losses):
        return []
    low, high = float(losses.min()), float(losses.max())
    cut = "".join(f"; {mark} goes on to {last:,.0f}" for mark, last in ends.items() if last > end)
    title = f"Loss over {unit}, from {low:.4g} to {high:.4g}{cut}"
    return [Chart(title, f"{end:,.0f} {unit}", unit, end, "", low, high, tuple(lines))]


def _figures(a: Row, b: Row) -> Section:
    rows = [
        *_settings(a, b),
        (time_title((a, b)).lower(), *(or_dash(row.step_us, duration) for row in (a, b))),
        ("samples/s", *(or_dash(row.samples_per_s, number) for row in (a, b))),
        ("peak memory", *(or_dash(row.memory_bytes, gib) for row in (a, b))),
    ]
    cells = [row for row in rows if set(row[1:]) != {DASH}]
    losses = {mark: plain(row.loss_words) for (mark, _), row in zip(_SIDES, (a, b), strict=True) if row.loss_words}
    lines = [f"Loss of {mark} against the baseline: {words}." for mark, words in losses.items()]
    columns = [Column(""), Column("A", "wrap"), Column("B", "wrap")]
    return Section.table("Settings that differ, and figures", columns, cells, lines)


def _settings(*rows: Row) -> list[tuple[str, str, str]]:
    """The settings that differ; a row that does not set one has the value that the other row replaced."""
    checks = {check.name: check.found for row in rows for check in row.checks if check.found}

    def cell(row: Row, name: str) -> str:
        if name not in row.settings:
            return checks.get(name, BASELINE)
        effects = [f", {effect(check)}" for check in row.checks if check.name == name]
        return f"{row.settings[name]}{''.join(effects[-1:])}"

    a, b = rows
    names = [name for name in {**a.settings, **b.settings} if a.settings.get(name) != b.settings.get(name)]
    return [(name, cell(a, name), cell(b, name)) for name in names]


def _operators(*both: tuple[Row, Facts], per_sample: bool) -> Section | None:
    """The operators whose times differ most, to show what the settings changed."""
    title = f"Operators that differ most, per traced {'step, for one sample' if per_sample else 'step'}"
    bare = [mark for mark, (_, figures) in zip("AB", both, strict=True) if figures.breakdown is None]
    if bare:
        return Section(title, lines=(f"Not measurable: no traced steps in {' and '.join(bare)}.",))
    if not any(figures.operators for _, figures in both):
        return None
    on_gpu = all(any(row.device_us is not None for row in figures.operators) for _, figures in both)
    times: list[dict[str, float]] = []
    for row, figures in both:
        us: defaultdict[str, float] = defaultdict(float)
        for cost in without_parts(figures.operators):
            own_us = (cost.device_us or 0.0) if on_gpu else cost.self_us
            us[operator_name(cost.name)] += own_us / _divisor(row, per_sample=per_sample)
        times.append(dict(us))
    of_a, of_b = times
    change = {name: of_b.get(name, 0.0) - of_a.get(name, 0.0) for name in {**of_a, **of_b}}
    names = sorted(change, key=lambda name: -abs(change[name]))[:_OPERATORS]
    cells = [(name, *(or_dash(us.get(name), duration) for us in times), _signed(change[name])) for name in names]
    columns = [Column("GPU time" if on_gpu else "CPU time", "cut"), *numbers("A", "B", "difference")]
    note = "Tracing slows a step down: compare these times with each other only."
    return Section.table(title, columns, cells, [note])


def _signed(us: float) -> str:
    return f"{'+' if us > 0 else '−' if us < 0 else ''}{duration(abs(us))}"
