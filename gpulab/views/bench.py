"""Runs of a cell as one table that is a picture: the rows of a bench, the arms of a comparison, the tries of a climb.

A pure function of the rows. The same HTML stands in the live bench, whose script makes it answer to clicks, and in
pages and saved notebooks, where it only shows. Every text is escaped here.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from gpulab.formatting import capitalized, duration, gib, number, percent, plural, speed_within, speedup
from gpulab.tuning.bench import Bench, Row, Speed, Sum, best_of, cost_of_row, inverse, pair_speeds, plain_text
from gpulab.tuning.compare.parts import AGREES
from gpulab.tuning.record import BASELINE
from gpulab.verdict import TOO_FEW
from gpulab.views import bars
from gpulab.views.bars import (  # fmt: skip
    FLOOR,
    POINT,
    PREDICTED,
    UNDECIDED,
    VERDICTS,
    FactorAxis,
    FactorRange,
    axis_of,
    factor_axis,
    factor_row,
    key,
    safe,
    stepped_axis,
)
from gpulab.views.html import fragment_section
from gpulab.views.layout import Section
from gpulab.views.wording import PARTS, plain

NOTHING = "This text of the cell has not run yet: run the baseline, then its settings can be changed."
IN_CELL = "now in the cell"
_BEST = ' <span class="gp-best" title="The fastest that is faster for certain">best</span>'
_MOST_POINTS = 60
_NARROW_TITLES = {"time": "step", "memory": "peak memory", "loss": "loss", "device": "GPU utilization"}
_WAITS = ("data_wait", "core_wait", "communication")
_SHORT_LOSS = {
    "same": "same",
    "within the band": "same within seeds",
    "outside the band": "differs beyond seeds",
    "different": "differs",
    "seeds not run": "differs, seeds not run",
    "not measurable": "unknown",
}
_DECIDE = (
    ' <button type="button" data-do="decide" title="Measure more pairs until it is faster, slower or the same">'
    "Decide it</button>"
)
_ACTIONS = (
    ("again", "Run again", "Measure this setting again; replaces its earlier pairs"),
    ("use", "Set toggles", "Put the toggles above to this row's settings"),
    ("rename", "Rename", "Give the row a name of your own"),
    ("pin", "Pin", "Keep the row on top"),
    ("remove", "Remove", "Take the row off the bench; its run stays on disk"),
)


def groups(bench: Bench) -> list[tuple[Row, ...]]:
    """The rows of each text that the cell has had, those of what it has now first."""
    now, *earlier = (ordered(bench.at(code)) for code in (bench.code, *reversed(bench.texts)))
    marked = [tuple(_marked(row) if is_in(bench, row) else row for row in rows) for rows in earlier]
    return [now, *marked]


def _marked(row: Row) -> Row:
    return replace(row, origin=f"{row.origin}; {IN_CELL}" if row.origin else IN_CELL)


def is_in(bench: Bench, row: Row) -> bool:
    """Whether the cell has the row's edit now."""
    return bool(row.cell) and plain_text(row.cell) == bench.code


def ordered(bench: Bench) -> tuple[Row, ...]:
    """The baseline first, then pinned ones, then the others as they came."""
    return tuple(sorted(bench.shown, key=lambda row: (bool(row.settings), not row.pinned)))


def axis_so_far(rows: Sequence[Row], before: FactorAxis | None) -> FactorAxis:
    """The axis of rows that are being measured, which had this one before."""
    return stepped_axis((factor for shown in factor_ranges(rows) for factor in shown.factors), before)


def tables(bench: Bench, marks: Sequence[str] = (), *, alive: bool = False, axis: FactorAxis | None = None) -> str:
    """A table of each text that the cell has had: speedups of two texts have no common baseline."""
    now, *earlier = groups(bench)
    return table(now, marks, alive=alive, axis=axis) + "".join(
        f'<p class="gp-quiet">{safe(_before(rows, bench))}</p>{table(rows, marks, alive=alive)}'
        for rows in earlier
        if rows
    )


def _before(rows: Sequence[Row], bench: Bench) -> str:
    applied = ", ".join(row.title for row in rows if plain_text(row.cell) in (bench.code, *bench.texts))
    on = f"the cell without {applied}" if applied else "another text of the cell"
    return f"Measured on {on}: these speedups have another baseline."


def table(
    rows: Sequence[Row], marks: Sequence[str] = (), *, alive: bool = False, axis: FactorAxis | None = None
) -> str:
    """All rows, the first is the baseline. `marks` are the ids of A and B; `alive`: rows answer to clicks and keys."""
    if not rows:
        return f'<p class="gp-quiet">{NOTHING}</p>'
    ranges = factor_ranges(rows)
    axis = axis or axis_of(factor for shown in ranges for factor in shown.factors)
    divided = any(row.shares or row.shares_left_out for row in rows)
    columns = [
        ("setting", "Setting"),
        ("speed", "Speedup, log scale; 1 is the baseline"),
        ("time", time_title(rows)),
        *([("shares", "Where a step's time goes, traced run")] if divided else []),
        *([("memory", "Peak memory")] if any(row.memory_bytes for row in rows) or alive else []),
        *([("loss", "Loss")] if any(row.loss for row in rows) else []),
        *([("device", "GPU utilization")] if any(row.utilization is not None for row in rows) else []),
        *([("do", "")] if alive else []),
    ]
    sortable = {"setting", "speed", "time", "memory"} if alive else set[str]()
    head = "".join(_head_cell(kind, title, sortable) for kind, title in columns)
    best, kinds = best_of(rows), [kind for kind, _ in columns]
    by_blocks = any(row.by_blocks for row in rows)
    narrow = _NARROW_TITLES | ({"time": "step in blocks"} if by_blocks else {})
    rated = any(row.speed is not None and row.speed.pairs for row in rows)  # else reports have a rate of their own
    body = ""
    for place, (row, shown) in enumerate(zip(rows, ranges, strict=True)):
        mark = "AB"[marks.index(row.id)] if row.id in marks else ""
        cells = _cells(row, shown, axis, best, mark, alive=alive, rated=rated, by_blocks=by_blocks)
        cells["speed"] += _cost(rows[0], row)
        acts = _acts(row, place, words(row, best, rows[0]), marked=bool(mark)) if alive else ""
        named = {kind: f' data-title="{title}"' for kind, title in narrow.items() if cells[kind]}
        inside = "".join(f'<td class="gp-{kind}"{named.get(kind, "")}>{cells[kind]}</td>' for kind in kinds)
        body += f"<tr{acts}>{inside}</tr>"
    under = f'<tr class="gp-axis"><td></td><td>{factor_axis(axis)}</td></tr>'
    tail = f"<tfoot>{under}</tfoot>" if any(shown.middle is not None for shown in ranges[1:]) else ""
    names = ' role="grid" aria-label="Runs of this cell"' if alive else ""
    return (
        f'<table class="gp-rows"{names}><thead><tr>{head}</tr></thead><tbody>{body}</tbody>{tail}</table>'
        f"{_speed_legend(rows, ranges)}{bars.parts_legend(row.shares for row in rows)}"
    )


def picture(rows: Sequence[Row], axis: FactorAxis | None = None) -> str:
    """The table in a page or an output that has the style sheet of its own."""
    return f'<div class="gp-bench gp-static gp-plain">{table(rows, axis=axis)}</div>'


def _head_cell(kind: str, title: str, sortable: set[str]) -> str:
    if kind not in sortable:
        return f'<th scope="col" class="gp-{kind}">{safe(title)}</th>'
    button = f'<button type="button" data-sort="{kind}" title="Sort by this column">{safe(title)}</button>'
    return f'<th scope="col" class="gp-{kind}" aria-sort="none">{button}</th>'


def _cells(
    row: Row,
    shown: FactorRange,
    axis: FactorAxis,
    best: Row | None,
    mark: str,
    *,
    alive: bool,
    rated: bool,
    by_blocks: bool,
) -> dict[str, str]:
    return {
        "setting": _setting(row, best, mark),
        "speed": _speed(row, shown, axis, alive=alive),
        "time": _time(row, rated=rated, by_blocks=by_blocks),
        "shares": bars.bar(bars.of_parts(row.shares), height_px=14) if row.shares else _no_shares(row),
        "memory": safe(gib(row.memory_bytes)) if row.memory_bytes else _unknown(row, "Peak memory"),
        "loss": _loss(row),
        "device": safe(percent(row.utilization)) if row.utilization is not None else _unknown(row, "Utilization"),
        "do": _menu(row),
    }


def _acts(row: Row, place: int, label: str, *, marked: bool) -> str:
    """The attributes by which a row is sorted, chosen and read out."""
    speed = (row.speed and row.speed.times_as_fast) or float(row.is_baseline)
    keys = {"number": place, "speed": speed, "time": row.step_us or 1e18, "memory": row.memory_bytes or 1e18}
    data = "".join(f' data-by-{name}="{value}"' for name, value in keys.items())
    return (
        f' data-row="{safe(row.id)}" data-by-setting="{safe(row.title)}"{data} tabindex="0" '
        f'aria-selected="{"true" if marked else "false"}" aria-label="{safe(label)}"'
    )


def _setting(row: Row, best: Row | None, mark: str) -> str:
    marked = f'<span class="gp-mark">{mark}</span> ' if mark else ""
    pin = ' <span class="gp-quiet">pinned</span>' if row.pinned else ""
    below = [row.label] if row.name and row.settings and row.name != row.label else []
    below += [row.origin] if row.origin else []
    quiet = f'<div class="gp-quiet">{safe("; ".join(below))}</div>' if below else ""
    return f"{marked}<b>{safe(row.title)}</b>{_BEST if row is best else ''}{pin}{quiet}"


def _speed(row: Row, shown: FactorRange, axis: FactorAxis, *, alive: bool) -> str:
    if row.failure:
        return f'<span class="gp-bad">{safe(capitalized(row.failure))}</span>'
    if row.is_baseline:
        words = "1×" if row.title == BASELINE else f"1×, {BASELINE}"
        return f"<div>{words}</div>{factor_row(axis, shown)}"
    if row.speed is None or row.speed.ratio is None:
        return '<span class="gp-quiet">not compared</span>'
    decide = _DECIDE if alive and row.speed.verdict == "undecided" and not row.speed.is_running else ""
    return f"<div>{_speed_words(row.speed)}{decide}</div>{factor_row(axis, shown)}"


def _speed_words(speed: Speed) -> str:
    assert speed.ratio is not None
    middle, around = speed_within(speed.ratio, speed.interval)
    figures = f"<b>{middle}×</b> ({around})" if around else f"<b>{middle}×</b>"
    pairs = speed.pairs_to_decide if speed.pairs >= TOO_FEW else None
    more = f"; about {pairs} pairs would decide" if pairs else ""
    unit = " per sample" if speed.per == "sample" else ""
    how = plural(speed.pairs, "pair") if speed.pairs else "sequential runs"
    return f'{figures}{unit} <span class="gp-quiet">{safe(speed.said)}, {how}{more}</span>'


def _cost(first: Row, row: Row) -> str:
    cost = cost_of_row(first, row)
    tone = "gp-quiet" if cost is None or cost.pays else "gp-caution"
    return f'<div class="{tone}">{safe(capitalized(cost.words))}</div>' if cost is not None else ""


def factor_ranges(rows: Sequence[Row]) -> list[FactorRange]:
    """Each speedup with its interval, the noise and what was predicted; the pairs of one that has no interval, and of
    only two rows.
    """
    first, *others = rows
    shown = [FactorRange(1.0, None, UNDECIDED) if first.is_baseline else _range(first)]
    for row in others:
        alone = len(others) == 1 or (row.speed is not None and row.speed.interval is None)
        shown.append(_range(row, pair_speeds(first, row)[:_MOST_POINTS] if alone else ()))
    return shown


def _range(row: Row, points: tuple[float, ...] = ()) -> FactorRange:
    speed, predicted = row.speed, row.prediction.interval if row.prediction is not None else None
    if speed is None or not speed.ratio or row.failure:
        return FactorRange(None, None, UNDECIDED)
    return FactorRange(
        speed.times_as_fast,
        speed.times_as_fast_interval,
        VERDICTS.get(speed.verdict, UNDECIDED),
        speed.noise_floor or 0.0,
        points,
        inverse(predicted) if predicted is not None and predicted[0] > 0 else None,
        bar=True,
    )


def time_title(rows: Sequence[Row]) -> str:
    """Of what a step's time is."""
    return "Step time: baseline in its blocks ÷ speedup" if any(row.by_blocks for row in rows) else "Step time"


def _time(row: Row, *, rated: bool, by_blocks: bool) -> str:
    if not row.step_us:
        return _unknown(row, "The time of a step")
    rate = row.samples_per_s if rated else None
    below = [f"{number(rate)} samples/s"] if rate else []
    below += [run_words(row)] if row.by_blocks else ["its traced run, no blocks"] * by_blocks
    quiet = "".join(f'<div class="gp-quiet">{safe(words)}</div>' for words in below if words)
    return f"<div>{safe(duration(row.step_us))}</div>{quiet}"


def _by_what(row: Row) -> str:
    """What the time of a step rests on."""
    if not row.by_blocks:
        return ""
    return " in interleaved blocks" if row.is_baseline else " by its speedup in interleaved blocks"


def run_words(row: Row) -> str:
    """The time of the run in full, where that is another one than in the blocks, and why; else empty."""
    if not row.by_blocks or not row.run_us or not row.step_us or 1 / AGREES <= row.run_us / row.step_us <= AGREES:
        return ""
    return f"{duration(row.run_us)} in its traced run{', under CPU contention' if _slowed(row) else ''}"


def _slowed(row: Row) -> bool:
    return row.contended and (row.run_us or 0.0) > (row.step_us or 0.0)


def _speed_legend(rows: Sequence[Row], ranges: Sequence[FactorRange]) -> str:
    """What is drawn of a speedup, in the colour of the first verdict there is."""
    drawn = [
        shown
        for row, shown in zip(rows, ranges, strict=True)
        if row.speed is not None and (shown.interval or shown.points)
    ]
    if not drawn:
        return ""
    colour = next((shown.colour for shown in drawn if shown.colour != UNDECIDED), UNDECIDED)
    floors = {shown.floor for shown in drawn}
    most = "at most " if len(floors) > 1 else ""
    interval = ", thick: 95 % interval" if any(shown.interval for shown in drawn) else " so far"
    entries = [(colour, f"speedup, tick: median{interval}")]
    entries += [(FLOOR, f"run-to-run noise of the baseline, {most}{percent(max(floors))}")] if max(floors) else []
    entries += [(PREDICTED, "predicted")] if any(shown.predicted for shown in drawn) else []
    return key([*entries, *[(POINT, "pairs of blocks")] * any(shown.points for shown in drawn)])


def _loss(row: Row) -> str:
    if not row.loss:
        return "" if row.is_baseline else _unknown(row, "The loss")
    alarm = ' class="gp-bad"' if row.loss in ("outside the band", "different") else ""
    return f'<span{alarm} title="{safe(row.loss_words)}">{safe(_SHORT_LOSS.get(row.loss, row.loss))}</span>'


def _menu(row: Row) -> str:
    able = [a for a in _ACTIONS if row.settings or a[0] in ("again", "use")]
    named = {"pin": "Unpin"} if row.pinned else {}
    buttons = "".join(
        f'<button type="button" data-do="{key}" title="{safe(hint)}">{named.get(key, title)}</button>'
        for key, title, hint in able
    )
    label = safe(f"More for {row.title}")
    summary = f'<summary aria-label="{label}" title="{label}">⋯</summary>'
    return f'<details class="gp-menu">{summary}<div>{buttons}</div></details>'


def _no_shares(row: Row) -> str:
    if not row.shares_left_out or row.failure:
        return _unknown(row, "Where a step goes")
    return f'<span class="gp-quiet" title="{safe(capitalized(row.shares_left_out))}">breakdown left out</span>'


def _unknown(row: Row, what: str) -> str:
    """A row that failed has said so already."""
    return "" if row.failure else f'<span class="gp-quiet" title="{safe(what)} is not known">–</span>'


# in words


def words(row: Row, best: Row | None, first: Row) -> str:
    """The row as a sentence, for a screen reader and a terminal."""
    cost = cost_of_row(first, row)
    parts = [row.title] if row.settings else list(dict.fromkeys((row.title, row.label)))
    if row.failure:
        parts.append(row.failure)
    elif row.speed is not None and row.speed.times_as_fast:
        times = speedup(row.speed.times_as_fast, row.speed.times_as_fast_interval, ("speedup {}", ""))
        parts.append(f"{times}, {row.speed.said}")
    parts += [cost.words] if cost is not None else []
    if row.step_us:
        parts.append(f"{duration(row.step_us)} per step{_by_what(row)}")
        parts += filter(None, [run_words(row)])
    waits = {PARTS[name].label: row.shares[name] for name in _WAITS if row.shares.get(name, 0.0) > 0}
    if waits:
        parts.append(", ".join(f"{percent(share)} {name}" for name, share in waits.items()))
    if row.memory_bytes:
        parts.append(f"{gib(row.memory_bytes)} peak memory")
    if row.loss:
        parts.append(f"loss {_SHORT_LOSS.get(row.loss, row.loss)}")
    if row is best:
        parts.append("the best")
    return plain("; ".join(parts))


def text(bench: Bench) -> str:
    """A line per row."""
    now, *earlier = groups(bench)
    lines = [words(row, best_of(now), now[0]) for row in now] or [NOTHING]
    for rows in filter(None, earlier):
        lines += [_before(rows, bench), *(words(row, best_of(rows), rows[0]) for row in rows)]
    return "\n".join(lines)


def figures(rows: Sequence[Row]) -> str:
    """What is measured so far, for one line: "baseline 179 ms, workers=2 86 ms, speedup 2.1× (1.8–2.4), 5 pairs"."""
    first, *others = rows
    measured = [row for row in others if row.speed is not None and row.speed.times_as_fast]
    if not measured or not first.step_us:
        return ""
    parts = [f"{first.title} {duration(first.step_us)}"]
    for row in measured:
        assert row.speed is not None and row.speed.times_as_fast is not None
        times = speedup(row.speed.times_as_fast, row.speed.times_as_fast_interval, ("speedup {}", ""))
        step = f" {duration(row.step_us)}" if row.step_us else ""
        parts.append(f"{row.title}{step}, {times}, {plural(row.speed.pairs, 'pair')}")
    return "; ".join(parts)


def sum_words(total: Sum) -> str:
    """Whether the gains add up, as a sentence with its figures."""
    expected, _ = speed_within(total.expected, None)
    measured, _ = speed_within(total.measured, None)
    how = {
        "less": f"The gains do not add up: {measured}× together, {expected}× expected",
        "more": f"Together they gain more than expected: {measured}×, {expected}× expected",
        "as much": f"The gains add up: {measured}× together, {expected}× expected",
        "undecided": f"Undecided whether the gains add up: {measured}× together, {expected}× expected",
    }
    return f"{how[total.verdict]}."


def full_run_words(row: Row) -> str:
    """What the report of a row is of, as HTML: its own run is not what the table's time rests on."""
    if not row.by_blocks or not row.run_us:
        return ""
    which = f"the {BASELINE}" if row.title == BASELINE else row.title
    words = (
        f"This report is of one traced run of {which}: {duration(row.run_us)} per step. "
        f"In the table,{_by_what(row)}: {duration(row.step_us)}."
    )
    why = "CPU contention slowed that run." if _slowed(row) else "They were measured at different times."
    return bars.caption(f"{words} {why}" if run_words(row) else words)


def edit_html(row: Row, bench: Bench) -> str:
    """What keeps the row's settings: what they take once, then a diff of the cell or a snippet."""
    cost = next((cost_of_row(rows[0], row) for rows in groups(bench) if row.id in {own.id for own in rows}), None)
    lines = (f"{capitalized(cost.words)}.",) if cost is not None else ()
    return fragment_section(Section("", lines=lines, code=row.edit))


def static_page(bench: Bench, head: str, below: str = "") -> str:
    """What a saved notebook shows without a kernel: the table, and under it what was opened last."""
    style = f"<style>{bars.static('rows.css')}</style>"
    detail = f'<div class="gp-detail">{below}</div>' if below else ""
    panes = f'<div class="gp-panes"><div class="gp-table">{tables(bench)}</div>{detail}</div>'
    return f'<div class="gp-bench gp-static">{style}{head}{panes}</div>'
