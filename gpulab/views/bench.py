"""Runs of a cell as one table that is a picture: the rows of a bench, the arms of a comparison, the tries of a climb.

A pure function of the rows. The same HTML stands in the live bench, whose script makes it answer to clicks, and in
pages and saved notebooks, where it only shows.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup
from msgspec.structs import replace

from gpulab.formatting import capitalized, duration, gib, number, percent, plural, speed_within, speedup
from gpulab.tuning.bench import Bench, Row, Sum, best_of, cost_of_row, pair_speeds, plain_text
from gpulab.tuning.compare.parts import AGREES
from gpulab.tuning.record import BASELINE, Speed, inverse
from gpulab.verdict import TOO_FEW
from gpulab.views.bars import (
    FLOOR,
    POINT,
    PREDICTED,
    UNDECIDED,
    VERDICTS,
    FactorAxis,
    FactorRange,
    Segment,
    axis_of,
    labels,
    layers,
    of_parts,
    parts_key,
    stepped_axis,
)
from gpulab.views.html import fragment_section, macros
from gpulab.views.layout import Section
from gpulab.views.wording import PARTS, plain

NOTHING = "This text of the cell has not run yet: run the baseline, then its settings can be changed."
IN_CELL = "now in the cell"
_MOST_POINTS = 60
_WAITS = ("data_wait", "core_wait", "communication")
_SHORT_LOSS = {
    "same": "same",
    "within the band": "same within seeds",
    "outside the band": "differs beyond seeds",
    "different": "differs",
    "seeds not run": "differs, seeds not run",
    "not measurable": "unknown",
}


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
    return tuple(sorted(bench.table, key=lambda row: (bool(row.settings), not row.pinned)))


def axis_so_far(rows: Sequence[Row], before: FactorAxis | None) -> FactorAxis:
    """The axis of rows that are being measured, which had this one before."""
    return stepped_axis((factor for shown in factor_ranges(rows) for factor in shown.factors), before)


def tables(bench: Bench, marks: Sequence[str] = (), *, alive: bool = False, axis: FactorAxis | None = None) -> str:
    """A table of each text that the cell has had: speedups of two texts have no common baseline."""
    now, *earlier = groups(bench)
    shown = [(_before(rows, bench), drawn_rows(rows, marks, alive=alive)) for rows in earlier if rows]
    return str(macros("bench.html").tables(drawn_rows(now, marks, alive=alive, axis=axis), shown, alive))


def _before(rows: Sequence[Row], bench: Bench) -> str:
    applied = ", ".join(row.title for row in rows if plain_text(row.cell) in (bench.code, *bench.texts))
    on = f"the cell without {applied}" if applied else "another text of the cell"
    return f"Measured on {on}: these speedups have another baseline."


def picture(rows: Sequence[Row], axis: FactorAxis | None = None) -> Markup:
    """The table in a page or an output that has the style sheet of its own."""
    drawn: Markup = macros("bench.html").picture(drawn_rows(rows, axis=axis))
    return drawn


def drawn_rows(
    rows: Sequence[Row], marks: Sequence[str] = (), *, alive: bool = False, axis: FactorAxis | None = None
) -> dict[str, object]:
    """What `templates/bench.html` draws, the first row is the baseline.

    `marks` are the ids of A and B; `alive`: rows answer to clicks and keys.
    """
    if not rows:
        return {"lines": [], "nothing": NOTHING}
    ranges = factor_ranges(rows)
    axis = axis or axis_of(factor for shown in ranges for factor in shown.factors)
    by_blocks = any(row.by_blocks for row in rows)
    columns = {
        "setting": "Setting",
        "speed": "Speedup, log scale; 1 is the baseline",
        "time": time_title(rows),
        "shares": "Where a step's time goes, traced run",
        "memory": "Peak memory",
        "loss": "Loss",
        "device": "GPU utilization",
        "do": "",
    }
    lacks = {
        "shares": not any(row.shares or row.no_shares_reason for row in rows),
        "memory": not alive and not any(row.memory_bytes for row in rows),
        "loss": not any(row.loss for row in rows),
        "device": all(row.utilization is None for row in rows),
        "do": not alive,
    }
    rated = any(row.speed is not None and row.speed.pairs for row in rows)  # else reports have a rate of their own
    lines = []
    for row, shown in zip(rows, ranges, strict=True):
        rate, renamed = row.samples_per_s if rated else None, bool(row.settings) and row.name not in ("", row.label)
        lines.append(
            {
                "row": row,
                "mark": "AB"[marks.index(row.id)] if row.id in marks else "",
                "is_best": row is best_of(rows),
                "below": "; ".join([row.label] * renamed + [row.origin] * bool(row.origin)),
                "layers": layers(axis, shown),
                "speed": speed_within(row.speed.ratio, row.speed.interval) if row.speed and row.speed.ratio else None,
                "speed_rests_on": _rests_on(row.speed) if row.speed is not None else "",
                "sort_speed": (row.speed and row.speed.times_as_fast) or float(row.is_baseline),
                "cost": cost_of_row(rows[0], row),
                "time_rests_on": [
                    f"{number(rate)} samples/s" if rate else "",
                    run_words(row) if row.by_blocks else "its traced run, no blocks" * by_blocks,
                ],
                "parts": of_parts(row.shares),
                "loss": _SHORT_LOSS.get(row.loss, row.loss),
                "words": words(row, best_of(rows), rows[0]),
            }
        )
    return {
        "lines": lines,
        "columns": [(kind, title) for kind, title in columns.items() if not lacks.get(kind)],
        "by_blocks": by_blocks,
        "has_axis": any(shown.middle is not None for shown in ranges[1:]),
        "labels": labels(axis),
        "speed_key": _speed_key(rows, ranges),
        "parts_key": parts_key(row.shares for row in rows),
    }


def _rests_on(speed: Speed) -> str:
    """The verdict, by how many pairs, and how many would decide it."""
    pairs = speed.pairs_to_decide if speed.pairs >= TOO_FEW else None
    more = f"; about {pairs} pairs would decide" if pairs else ""
    return f"{speed.said}, {plural(speed.pairs, 'pair') if speed.pairs else 'sequential runs'}{more}"


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


def _speed_key(rows: Sequence[Row], ranges: Sequence[FactorRange]) -> list[Segment]:
    """What is drawn of a speedup, in the colour of the first verdict there is."""
    drawn = [
        shown
        for row, shown in zip(rows, ranges, strict=True)
        if row.speed is not None and (shown.interval or shown.points)
    ]
    if not drawn:
        return []
    colour = next((shown.colour for shown in drawn if shown.colour != UNDECIDED), UNDECIDED)
    floors = {shown.floor for shown in drawn}
    most = "at most " if len(floors) > 1 else ""
    interval = ", thick: 95 % interval" if any(shown.interval for shown in drawn) else " so far"
    noise = f"run-to-run noise of the baseline, {most}{percent(max(floors))}"
    return [
        Segment(f"speedup, tick: median{interval}", 0, colour),
        *([Segment(noise, 0, FLOOR)] if max(floors) else []),
        *([Segment("predicted", 0, PREDICTED)] if any(shown.predicted for shown in drawn) else []),
        *([Segment("pairs of blocks", 0, POINT)] if any(shown.points for shown in drawn) else []),
    ]


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
    return str(macros("bars.html").caption(f"{words} {why}" if run_words(row) else words))


def edit_html(row: Row, bench: Bench) -> str:
    """What keeps the row's settings: what they take once, then a diff of the cell or a snippet."""
    cost = next((cost_of_row(rows[0], row) for rows in groups(bench) if row.id in {own.id for own in rows}), None)
    lines = (f"{capitalized(cost.words)}.",) if cost is not None else ()
    return str(fragment_section(Section("", lines=lines, code=row.edit)))


def static_page(bench: Bench, head: str, below: str = "") -> str:
    """What a saved notebook shows without a kernel: the table, and under it what was opened last, both as HTML."""
    return str(macros("bench.html").saved(Markup(head), Markup(tables(bench)), Markup(below)))
