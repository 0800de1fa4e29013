"""Both sides of a comparison in one table: times, throughput, memory, energy and cost."""

from __future__ import annotations

from collections.abc import Callable

from gpulab.formatting import NOT_MEASURABLE, capitalized, duration, gib, number, percent, reading, speed_within
from gpulab.tuning.bench import peak_bytes
from gpulab.tuning.compare.blocks import UNPROFILED, judged_by
from gpulab.tuning.compare.cost import spending
from gpulab.tuning.record import Comparison, Side
from gpulab.views.layout import Column, Section, numbers
from gpulab.views.wording import plain, shortened

_WIDEST = 22  # characters of a column's title
Cells = tuple[str, ...]


def name(side: Side) -> str:
    """What a side is called on screen."""
    return plain(side.label)


def heading(side: Side) -> str:
    """What a side is called above a column."""
    return shortened(name(side), _WIDEST)


def side_by_side(comparison: Comparison, price_per_hour: float | None) -> Section:
    """The figures of both, row by row. The one ratio there is stands below them, with its verdict."""
    a, b = comparison.a, comparison.b
    rows = [
        _row(f"a step, {_judged(comparison)}", a.us_per_step, b.us_per_step, duration),
        _row("a sample", a.us_per_sample, b.us_per_sample, duration),
        _throughput(comparison),
        *_memory_rows(a, b),
        *_spending_rows(a, b, price_per_hour),
    ]
    columns = (Column(""), *numbers(heading(a), heading(b)))
    lines = [verdict_line(comparison), _origin(comparison)]
    absent = [row[0] for row in rows if set(row[1:3]) == {NOT_MEASURABLE}]
    rows = [row for row in rows if row[0] not in absent]
    if absent:
        lines.append(f"Not measurable on either side: {'; '.join(absent)}.")
    if _without_energy(a, b):
        lines.append(f"No energy: {_without_energy(a, b)}.")
    if comparison.unit == "sample":
        lines.append("The batch differs: the two are compared per sample, not per step.")
    whole = next((row for row in rows if row[0].startswith(f"a {comparison.unit}")), None)
    result = in_one_line(comparison, *whole) if whole is not None else ""
    return Section.table("Side by side", columns, rows, lines, wide=True, result=result)


def in_one_line(comparison: Comparison, label: str, a: str, b: str) -> str:
    """A row of the table where the titles of its columns are not shown."""
    return f"{label}: {a} ({heading(comparison.a)}), {b} ({heading(comparison.b)})"


def verdict_line(comparison: Comparison) -> str:
    """The verdict and the figures it rests on."""
    if comparison.ratio is None:
        return "No ratio can be given."
    middle, around = speed_within(comparison.ratio, comparison.interval)
    interval = f", 95 % interval {around}" if around else ""
    floor = NOT_MEASURABLE if comparison.noise_floor is None else percent(comparison.noise_floor)
    alone = "by steps alone, " if comparison.verdict == "not comparable" else ""
    figures = f"{alone}B has a {middle}× speedup per {comparison.unit}{interval}; run-to-run noise {floor}"
    return f"{capitalized(comparison.verdict)}: {figures}."


def _origin(comparison: Comparison) -> str:
    """What the rows rest on: two kinds of runs."""
    profiled = "Memory: peak of one traced run each."
    if comparison.ratio is None:
        return profiled
    if comparison.evidence != "interleaved":
        return f"Times: as in each run's own report. {profiled}"
    pairs = "Times: A is the median of its blocks, B is A scaled by the ratio of the pairs."
    return f"{pairs} {profiled}"


def unprofiled_us(side: Side, comparison: Comparison) -> float | None:
    """A step without the profiler, as the blocks of the comparison have it; None where it rests on profiled steps."""
    return side.us_per_step if _judged(comparison) == UNPROFILED else None


def _judged(comparison: Comparison) -> str:
    return UNPROFILED if comparison.evidence == "interleaved" else judged_by(comparison.a.facts, comparison.b.facts)


def profiled_us(side: Side) -> float | None:
    """A step of the traced run, with the profiler."""
    traced = side.facts.traced_step_us if side.facts is not None else None
    return traced.median if traced is not None else None


def _throughput(comparison: Comparison) -> Cells:
    """By the blocks; of runs one after the other the mean that their reports have."""
    a, b = comparison.a, comparison.b
    if comparison.evidence == "interleaved":
        return _row("samples per second", _per_s(a.us_per_sample), _per_s(b.us_per_sample), number)
    of_a, of_b = (side.facts.samples_per_s if side.facts is not None else None for side in (a, b))
    return _row("samples per second, mean", of_a, of_b, number)


def _per_s(us: float | None) -> float | None:
    return 1e6 / us if us else None


def _row(label: str, a: float | None, b: float | None, written_as: Callable[[float], str]) -> Cells:
    written = [NOT_MEASURABLE if value is None else written_as(value) for value in (a, b)]
    return label, *written


def _memory_rows(a: Side, b: Side) -> list[Cells]:
    kinds = {side.facts.run.device.kind for side in (a, b) if side.facts is not None}
    wanted = [("peak memory, pages shared with workers counted in each", "peak_rss_bytes")]
    if "cuda" in kinds:
        wanted = [
            ("peak memory of tensors on the GPU", "peak_allocated_bytes"),
            ("peak memory reserved on the GPU", "peak_reserved_bytes"),
            *wanted,
        ]
    return [_row(label, peak_bytes(a.facts, field), peak_bytes(b.facts, field), gib) for label, field in wanted]


def _spending_rows(a: Side, b: Side, price_per_hour: float | None) -> list[Cells]:
    of_a, of_b = spending(a, price_per_hour), spending(b, price_per_hour)
    if of_a.device_s is None and of_b.device_s is None:
        return []
    on_gpu = any(side.facts is not None and side.facts.run.device.kind == "cuda" for side in (a, b))
    rows = [
        *([_row("device time of a million samples", of_a.device_s, of_b.device_s, _of_seconds)] if on_gpu else []),
        _row("energy of a million samples", _kwh(of_a.energy_j), _kwh(of_b.energy_j), lambda kwh: reading(kwh, "kWh")),
    ]
    if price_per_hour is not None:
        label = f"cost of a million samples, at {price_per_hour:g} an hour"
        rows.append(_row(label, of_a.cost, of_b.cost, number))
    return rows


def _of_seconds(seconds: float) -> str:
    return duration(seconds * 1e6)


def _kwh(energy_j: float | None) -> float | None:
    return None if energy_j is None else energy_j / 3.6e6


def _without_energy(a: Side, b: Side) -> str:
    reasons = dict.fromkeys(spending(side).why_no_energy for side in (a, b))
    return "; ".join(plain(reason) for reason in reasons if reason)
