"""The rows of a bench as one table that is a picture: on a page with a kernel behind it, in a saved one, as text.

A pure function of the record. The same HTML stands in the live bench, whose script makes it answer to clicks, and in
the saved notebook, where it only shows. Every text is escaped here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from gpulab.analysis.steps import Spread
from gpulab.formatting import capitalized, duration, number, percent, plural, size, speed_within
from gpulab.tuning.bench import Bench, Row, Speed, Sum
from gpulab.verdict import TOO_FEW
from gpulab.views import html_bars, wording
from gpulab.views.html import fragment_section
from gpulab.views.html_bars import Segment, safe
from gpulab.views.html_rows import FLOOR, PREDICTED, UNDECIDED, VERDICTS, FactorRange, factor_axis, factor_row, key
from gpulab.views.interval_places import FactorAxis, axis_of
from gpulab.views.layout import Section
from gpulab.views.wording import plain

NOTHING = "Nothing has run yet."
_BEST = ' <span class="gp-best" title="The fastest that is faster for certain">best</span>'
_LEAST = 0.01  # of a step: a smaller part has no place in a legend
_WAITS = ("data_wait", "core_wait", "communication")
_SHORT_LOSS = {
    "same": "same",
    "within the band": "same within seeds",
    "outside the band": "differs",
    "different": "differs",
    "not measurable": "unknown",
}
_ACTIONS = (
    ("decide", "Decide it", "Measure more pairs of blocks until it is faster, slower or the same"),
    ("again", "Run again", "Measure this setting again; replaces its earlier pairs"),
    ("use", "Set toggles", "Put the toggles above to this row's settings"),
    ("rename", "Rename", "Give the row a name of your own"),
    ("pin", "Pin", "Keep the row on top"),
    ("remove", "Remove", "Take the row off the bench; its run stays on disk"),
)


def ordered(bench: Bench) -> tuple[Row, ...]:
    """The baseline first, then pinned ones, then the others as they came; each with its step by the speedup."""
    rows = (replace(row, step_us=bench.step_us(row)) for row in bench.rows)
    return tuple(sorted(rows, key=lambda row: (bool(row.settings), not row.pinned)))


def table(bench: Bench, marks: Sequence[str] = (), *, alive: bool = False) -> str:
    """All rows. `marks` are the ids of A and B; `alive`: with the buttons of each row."""
    rows = ordered(bench)
    if not rows:
        return f'<p class="gp-quiet">{NOTHING}</p>'
    axis = axis_of(factor for row in rows for factor in _range(row).factors)
    devices = any(row.utilization is not None for row in rows)
    losses = any(row.loss for row in rows)
    columns = [
        ("setting", "Setting"),
        ("speed", "Speedup, log scale; 1 is the baseline"),
        ("time", "Step time, in blocks"),
        ("shares", "Where a step's time goes, traced run"),
        ("memory", "Peak memory"),
        *([("loss", "Loss")] if losses else []),
        *([("device", "GPU busy")] if devices else []),
        *([("do", "")] if alive else []),
    ]
    sortable = {"setting", "speed", "time", "memory"} if alive else set[str]()
    head = "".join(_head_cell(kind, title, sortable) for kind, title in columns)
    body = "".join(_row(row, bench, axis, marks, [kind for kind, _ in columns], number=n) for n, row in enumerate(rows))
    under = f'<tr class="gp-axis" aria-hidden="true"><td></td><td>{factor_axis(axis)}</td></tr>'
    tail = under if any(row.speed is not None for row in rows) else ""
    names = "Runs of this cell"
    return (
        f'<table class="gp-rows" role="grid" aria-label="{names}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody><tfoot>{tail}</tfoot></table>{_speed_legend(rows)}{_legend(rows)}"
    )


def _head_cell(kind: str, title: str, sortable: set[str]) -> str:
    if kind not in sortable:
        return f'<th scope="col" class="gp-{kind}">{safe(title)}</th>'
    button = f'<button type="button" data-sort="{kind}" title="Sort by this column">{safe(title)}</button>'
    return f'<th scope="col" class="gp-{kind}" aria-sort="none">{button}</th>'


def _row(row: Row, bench: Bench, axis: FactorAxis, marks: Sequence[str], kinds: Sequence[str], *, number: int) -> str:
    mark = "AB"[marks.index(row.id)] if row.id in marks else ""
    cells = {
        "setting": _setting(row, bench, mark),
        "speed": _speed(row, axis),
        "time": _time(row),
        "shares": _shares(row),
        "memory": safe(size(row.memory_bytes)) if row.memory_bytes else _unknown("Peak memory"),
        "loss": _loss(row),
        "device": safe(percent(row.utilization)) if row.utilization is not None else _unknown("Utilization"),
        "do": _menu(row),
    }
    titles = {"time": "step", "memory": "peak memory", "loss": "loss", "device": "GPU busy"}
    named = {kind: f' data-title="{title}"' for kind, title in titles.items() if cells[kind]}
    inside = "".join(f'<td class="gp-{kind}"{named.get(kind, "")}>{cells[kind]}</td>' for kind in kinds)
    speed = 1 / row.speed.ratio if row.speed and row.speed.ratio else float(not row.settings)
    keys = {"number": number, "speed": speed, "time": row.step_us or 1e18, "memory": row.memory_bytes or 1e18}
    data = "".join(f' data-by-{name}="{value}"' for name, value in keys.items())
    return (
        f'<tr data-row="{safe(row.id)}" data-by-setting="{safe(row.title)}"{data} tabindex="0" '
        f'aria-selected="{"true" if mark else "false"}" aria-label="{safe(words(row, bench))}">{inside}</tr>'
    )


def _setting(row: Row, bench: Bench, mark: str) -> str:
    marked = f'<span class="gp-mark">{mark}</span> ' if mark else ""
    best = _BEST if _is_best(row, bench) else ""
    pin = ' <span class="gp-quiet">pinned</span>' if row.pinned else ""
    below = [row.label] if row.name and row.name != row.label else []
    below += [row.origin] if row.origin else []
    quiet = f'<div class="gp-quiet">{safe("; ".join(below))}</div>' if below else ""
    return f"{marked}<b>{safe(row.title)}</b>{best}{pin}{quiet}"


def _is_best(row: Row, bench: Bench) -> bool:
    return bench.best is not None and bench.best.id == row.id


def _speed(row: Row, axis: FactorAxis) -> str:
    if row.failure:
        return f'<span class="gp-bad">{safe(capitalized(row.failure))}</span>'
    if not row.settings:
        return f"<div>1×</div>{factor_row(axis, FactorRange(1.0, None, UNDECIDED))}"
    if row.speed is None or row.speed.ratio is None:
        return '<span class="gp-quiet">not compared</span>'
    return f"<div>{_speed_words(row.speed)}</div>{factor_row(axis, _range(row))}"


def _speed_words(speed: Speed) -> str:
    assert speed.ratio is not None
    middle, around = speed_within(speed.ratio, speed.interval)
    figures = f"<b>{middle}×</b> ({around})" if around else f"<b>{middle}×</b>"
    said = speed.verdict if speed.interval is not None else "so far"
    more = ""
    if speed.verdict == "undecided" and speed.interval is not None:
        pairs = speed.pairs_to_decide if speed.pairs >= TOO_FEW else None
        more = f"; about {pairs} pairs would decide" if pairs else ""
    unit = " per sample" if speed.per == "sample" else ""
    return f'{figures}{unit} <span class="gp-quiet">{safe(said)}, {plural(speed.pairs, "pair")}{more}</span>'


def _range(row: Row) -> FactorRange:
    """The speedup, with what was predicted of it before it ran."""
    speed, prediction = row.speed, row.prediction
    if speed is None or speed.ratio is None:
        return FactorRange(None, None, UNDECIDED)
    interval = None if speed.interval is None else (1 / speed.interval[1], 1 / speed.interval[0])
    predicted = (
        None
        if prediction is None or prediction.interval[0] <= 0
        else (1 / prediction.interval[1], 1 / prediction.interval[0])
    )
    colour = VERDICTS.get(speed.verdict, UNDECIDED)
    return FactorRange(1 / speed.ratio, interval, colour, speed.noise_floor or 0.0, predicted=predicted, bar=True)


def _time(row: Row) -> str:
    if not row.step_us:
        return _unknown("The time of a step")
    rate = row.samples_per_s if row.speed is not None and row.speed.per == "sample" else None
    per_s = f'<div class="gp-quiet">{number(rate)} samples/s</div>' if rate else ""
    return f"<div>{safe(duration(row.step_us))}</div>{per_s}"


def _shares(row: Row) -> str:
    if not row.shares:
        return _unknown("Where a step goes")
    return html_bars.bar(_segments(row.shares), height_px=14)


def _segments(shares: Mapping[str, float]) -> tuple[Segment, ...]:
    return tuple(
        Segment(look.label, shares[name], look.colour, percent(shares[name]), bool(look.hatch))
        for name, look in wording.PARTS.items()
        if shares.get(name, 0) > 0
    )


def _speed_legend(rows: Sequence[Row]) -> str:
    """What is drawn of a speedup, in the colour of the first verdict there is."""
    speeds = [row.speed for row in rows if row.speed is not None and row.speed.interval is not None]
    if not speeds:
        return ""
    colour = next((VERDICTS[speed.verdict] for speed in speeds if speed.verdict in VERDICTS), UNDECIDED)
    predicted = [(PREDICTED, "predicted")] if any(row.prediction is not None for row in rows) else []
    median = (colour, "speedup, tick: median, thick: 95 % interval")
    return key([median, (FLOOR, "run-to-run noise of the baseline"), *predicted])


def _legend(rows: Sequence[Row]) -> str:
    """What the colours of all bars mean."""
    shown = {name for row in rows for name, share in row.shares.items() if share >= _LEAST}
    parts = [look for name, look in wording.PARTS.items() if name in shown]
    return (
        html_bars.legend(Segment(look.label, 0.0, look.colour, "", bool(look.hatch)) for look in parts) if parts else ""
    )


def _loss(row: Row) -> str:
    if not row.loss:
        return "" if not row.settings else _unknown("The loss")
    alarm = ' class="gp-bad"' if row.loss in ("outside the band",) else ""
    return f'<span{alarm} title="{safe(row.loss_words)}">{safe(_SHORT_LOSS.get(row.loss, row.loss))}</span>'


def _menu(row: Row) -> str:
    able = [a for a in _ACTIONS if row.settings or a[0] in ("again", "use")]
    named = {"pin": "Unpin"} if row.pinned else {}
    buttons = "".join(
        f'<button type="button" data-do="{key}" title="{safe(hint)}">{named.get(key, title)}</button>'
        for key, title, hint in able
        if key != "decide" or (row.speed is not None and row.speed.verdict == "undecided")
    )
    label = safe(f"More for {row.title}")
    summary = f'<summary aria-label="{label}" title="{label}">⋯</summary>'
    return f'<details class="gp-menu">{summary}<div>{buttons}</div></details>'


def _unknown(what: str) -> str:
    return f'<span class="gp-quiet" title="{safe(what)} was not measured">–</span>'


# in words


def words(row: Row, bench: Bench) -> str:
    """The row as a sentence, for a screen reader and a terminal."""
    parts = [row.title] if row.settings else list(dict.fromkeys((row.title, row.label)))
    if row.failure:
        parts.append(row.failure)
    elif row.speed is not None and row.speed.ratio is not None:
        middle, around = speed_within(row.speed.ratio, row.speed.interval)
        interval = f" ({around})" if around else ""
        parts.append(f"speedup {middle}×{interval}, {row.speed.verdict if around else 'so far'}")
    if row.step_us:
        parts.append(f"{duration(row.step_us)} per step")
    waits = sum(row.shares.get(name, 0.0) for name in _WAITS)
    if row.shares:
        parts.append(f"{percent(waits)} of it waiting")
    if row.memory_bytes:
        parts.append(f"{size(row.memory_bytes)} peak memory")
    if row.loss:
        parts.append(f"loss {_SHORT_LOSS.get(row.loss, row.loss)}")
    if _is_best(row, bench):
        parts.append("the best")
    return plain("; ".join(parts))


def text(bench: Bench) -> str:
    """A line per row."""
    rows = ordered(bench)
    return "\n".join(words(row, bench) for row in rows) if rows else NOTHING


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


def full_run_words(row: Row, step: Spread | None) -> str:
    """What the report of a row is of, as HTML: its own run is not what its speedup rests on."""
    if row.speed is None or row.speed.ratio is None or step is None:
        return ""
    words = (
        f"The full run of {row.title}, with its trace: {duration(step.median)} per step. The speedup above rests on "
    )
    return html_bars.caption(
        f"{words}{plural(row.speed.pairs, 'pair')} of short blocks, interleaved with the baseline."
    )


def edit_html(row: Row) -> str:
    """What keeps the row's settings: a diff of the cell, or a snippet."""
    return fragment_section(Section("", code=row.edit))


def static_page(bench: Bench, head: str, below: str = "") -> str:
    """What a saved notebook shows without a kernel: the table, and under it what was opened last."""
    return f'<div class="gp-bench gp-static">{style()}{head}{table(bench)}{below}</div>'


def style() -> str:
    return f"<style>{html_bars.static('bench.css')}</style>"
