"""Runs of a cell as one table that is a picture: the rows of a bench, the arms of a comparison, the tries of a climb.

The live bench, pages and saved notebooks have the same HTML. Only in the live bench does a script handle clicks.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup
from msgspec.structs import replace

from gpulab.formatting import capitalized, duration, factor, gib, number, percent, plural, speed_within, speedup
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
from gpulab.views.layout import Section
from gpulab.views.page import fragment_section, macros
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
    """The rows of each version of the cell's text, the current version first."""
    now, *earlier = (ordered(bench.at(code)) for code in (bench.code, *reversed(bench.texts)))
    marked = [
        tuple(
            replace(row, origin="; ".join(filter(None, (row.origin, IN_CELL)))) if is_in(bench, row) else row
            for row in rows
        )
        for rows in earlier
    ]
    return [now, *marked]


def is_in(bench: Bench, row: Row) -> bool:
    """Whether the cell already contains the row's edit."""
    return bool(row.cell) and plain_text(row.cell) == bench.code


def ordered(bench: Bench) -> tuple[Row, ...]:
    """The baseline first, then pinned rows, then the others in order of arrival."""
    return tuple(sorted(bench.table, key=lambda row: (bool(row.settings), not row.pinned)))


def axis_so_far(rows: Sequence[Row], before: FactorAxis | None) -> FactorAxis:
    """The axis of rows while they are measured; `before` is the axis that was drawn last."""
    return stepped_axis((factor for estimate in factor_ranges(rows) for factor in estimate.factors), before)


def tables(bench: Bench, marks: Sequence[str] = (), *, alive: bool = False, axis: FactorAxis | None = None) -> str:
    """A table for each version of the cell's text: their speedups have no common baseline."""
    now, *earlier = groups(bench)
    before = [(_before(rows, bench), table_values(rows, marks, alive=alive)) for rows in earlier if rows]
    return str(macros("bench.html").tables(table_values(now, marks, alive=alive, axis=axis), before, alive))


def _before(rows: Sequence[Row], bench: Bench) -> str:
    applied = ", ".join(row.title for row in rows if plain_text(row.cell) in (bench.code, *bench.texts))
    on = f"the cell without {applied}" if applied else "another text of the cell"
    return f"Measured on {on}: these speedups have another baseline."


def picture(rows: Sequence[Row], axis: FactorAxis | None = None) -> Markup:
    """The table for a page or an output that has the style sheet already."""
    table: Markup = macros("bench.html").picture(table_values(rows, axis=axis))
    return table


def table_values(
    rows: Sequence[Row], marks: Sequence[str] = (), *, alive: bool = False, axis: FactorAxis | None = None
) -> dict[str, object]:
    """The values for `templates/bench.html`; the first row is the baseline.

    `marks` are the ids of A and B. `alive`: rows react to clicks and keys.
    """
    if not rows:
        return {"lines": [], "nothing": NOTHING}
    ranges = factor_ranges(rows)
    axis = axis or axis_of(factor for estimate in ranges for factor in estimate.factors)
    by_blocks = any(row.by_blocks for row in rows)
    has_shares = any(row.shares or row.no_shares_reason for row in rows)
    columns = (
        ("setting", "Setting", True),
        ("speed", "Speedup, log scale; 1 is the baseline", True),
        ("time", time_title(rows), True),
        ("shares", "Where a step's time goes, traced run", has_shares),
        ("memory", "Peak memory", alive or any(row.memory_bytes for row in rows)),
        ("loss", "Loss", any(row.loss for row in rows)),
        ("device", "GPU utilization", any(row.utilization is not None for row in rows)),
        ("do", "", alive),
    )
    rated = any(row.speed is not None and row.speed.pairs for row in rows)  # else reports show their own rate
    lines = []
    for row, estimate in zip(rows, ranges, strict=True):
        rate, renamed = row.samples_per_s if rated else None, bool(row.settings) and row.name not in ("", row.label)
        lines.append(
            {
                "row": row,
                "mark": "AB"[marks.index(row.id)] if row.id in marks else "",
                "is_best": row is best_of(rows),
                "below": "; ".join([row.label] * renamed + [row.origin] * bool(row.origin)),
                "layers": layers(axis, estimate),
                "speed": row.speed and row.speed.ratio and speed_within(row.speed.ratio, row.speed.interval),
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
        "columns": [(kind, title) for kind, title, has_figures in columns if has_figures],
        "by_blocks": by_blocks,
        "has_axis": any(estimate.middle is not None for estimate in ranges[1:]),
        "labels": labels(axis),
        "speed_key": _speed_key(rows, ranges),
        "parts_key": parts_key(row.shares for row in rows),
    }


def _rests_on(speed: Speed) -> str:
    """The verdict, the number of pairs behind it, and how many pairs would decide it."""
    pairs = speed.pairs_to_decide if speed.pairs >= TOO_FEW else None
    more = f"; about {pairs} pairs would decide" if pairs else ""
    return f"{speed.said}, {plural(speed.pairs, 'pair') if speed.pairs else 'sequential runs'}{more}"


def factor_ranges(rows: Sequence[Row]) -> list[FactorRange]:
    """Each speedup with its interval, noise and prediction. Single pairs only for two rows or without an interval."""
    first, *others = rows
    ranges = [FactorRange(1.0, None, UNDECIDED) if first.is_baseline else _range(first)]
    for row in others:
        alone = len(others) == 1 or (row.speed is not None and row.speed.interval is None)
        ranges.append(_range(row, pair_speeds(first, row)[:_MOST_POINTS] if alone else ()))
    return ranges


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
    """The title of the column of step times: says how they were measured."""
    return "Step time: baseline in its blocks ÷ speedup" if any(row.by_blocks for row in rows) else "Step time"


def _by_what(row: Row) -> str:
    """How the time of a step was measured."""
    if not row.by_blocks:
        return ""
    return " in interleaved blocks" if row.is_baseline else " by its speedup in interleaved blocks"


def run_words(row: Row) -> str:
    """The step time of the traced run if it differs from that of the blocks, and why; else empty."""
    if not row.by_blocks or not row.run_us or not row.step_us or 1 / AGREES <= row.run_us / row.step_us <= AGREES:
        return ""
    return f"{duration(row.run_us)} in its traced run{', under CPU contention' if _slowed(row) else ''}"


def _slowed(row: Row) -> bool:
    return row.contended and (row.run_us or 0.0) > (row.step_us or 0.0)


def _speed_key(rows: Sequence[Row], ranges: Sequence[FactorRange]) -> list[Segment]:
    """The legend of the speedups, in the colour of the first verdict."""
    estimates = [
        estimate
        for row, estimate in zip(rows, ranges, strict=True)
        if row.speed is not None and (estimate.interval or estimate.points)
    ]
    if not estimates:
        return []
    colour = next((estimate.colour for estimate in estimates if estimate.colour != UNDECIDED), UNDECIDED)
    floors = {estimate.floor for estimate in estimates}
    most = "at most " if len(floors) > 1 else ""
    has_interval = any(estimate.interval for estimate in estimates)
    keys = (
        (f"speedup, tick: median{', thick: 95 % interval' if has_interval else ' so far'}", colour, True),
        (f"run-to-run noise of the baseline, {most}{percent(max(floors))}", FLOOR, any(floors)),
        ("predicted", PREDICTED, any(estimate.predicted for estimate in estimates)),
        ("pairs of blocks", POINT, any(estimate.points for estimate in estimates)),
    )
    return [Segment(words, 0, colour) for words, colour, is_visible in keys if is_visible]


# in words


def words(row: Row, best: Row | None, first: Row) -> str:
    """The row as a sentence, for a screen reader and a terminal."""
    cost = cost_of_row(first, row)
    parts = [row.title] if row.settings else list(dict.fromkeys((row.title, row.label)))
    if row.failure:
        parts.append(row.failure)
    elif row.speed is not None and row.speed.times_as_fast:
        parts.append(f"{_speedup(row.speed)}, {row.speed.said}")
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
    """The measurements so far, in one line: "baseline 179 ms, workers=2 86 ms, speedup 2.1× (1.8–2.4), 5 pairs"."""
    first, *others = rows
    parts = [f"{first.title} {duration(first.step_us)}"]
    for row in others:
        if row.speed is not None and row.speed.times_as_fast:
            step = f" {duration(row.step_us)}" if row.step_us else ""
            parts.append(f"{row.title}{step}, {_speedup(row.speed)}, {plural(row.speed.pairs, 'pair')}")
    return "; ".join(parts) if first.step_us and len(parts) > 1 else ""


def _speedup(speed: Speed) -> str:
    """ "speedup 2.1× (1.8–2.4)", also below 1."""
    return speedup(speed.times_as_fast or 1.0, speed.times_as_fast_interval, ("speedup {}", ""))


def sum_words(total: Sum) -> str:
    """Whether the gains add up, as a sentence with its figures."""
    how = {
        "less": "The gains do not add up",
        "more": "Together they gain more than expected",
        "as much": "The gains add up",
        "undecided": "Undecided whether the gains add up",
    }
    measured, expected = (factor(1 / ratio) for ratio in (total.measured, total.expected))
    together = "" if total.verdict == "more" else " together"
    return f"{how[total.verdict]}: {measured}×{together}, {expected}× expected."


def full_run_words(row: Row) -> str:
    """A caption for the report of a row, as HTML: the report shows one traced run, the table's time is from blocks."""
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
    """How to keep the row's settings: first their one-time cost, then a diff of the cell or a snippet."""
    cost = next((cost_of_row(rows[0], row) for rows in groups(bench) if any(row.id == one.id for one in rows)), None)
    lines = (f"{capitalized(cost.words)}.",) if cost is not None else ()
    return str(fragment_section(Section("", lines=lines, code=row.edit)))


def static_page(bench: Bench, head: str, below: str = "") -> str:
    """The HTML that a saved notebook shows without a kernel: the table, and below it the detail that was open last."""
    return str(macros("bench.html").saved(Markup(head), Markup(tables(bench)), Markup(below)))
