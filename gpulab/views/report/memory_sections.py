"""The sections of memory: what filled it at the peak, who holds it, why it ran out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from markupsafe import Markup
from msgspec.structs import replace

from gpulab.analysis.memory_peak import KINDS, PeakMemory, ledgers_of, memory_peak, over_steps
from gpulab.formatting import NOT_MEASURABLE, gib, percent, plural, size
from gpulab.memory_record import Holding, HoldingKind, Ledger, OutOfMemory
from gpulab.run import Run
from gpulab.views.bars import Segment
from gpulab.views.layout import PAIRS, Column, Row, Section, numbers
from gpulab.views.page import macros
from gpulab.views.run_figure import Chart, Line
from gpulab.views.wording import plain

COLOURS: Mapping[HoldingKind, str] = MappingProxyType(
    {
        "parameters": "#0072B2",
        "gradients": "#56B4E9",
        "optimizer state": "#009E73",
        "buffers": "#44AA99",
        "saved activations": "#E69F00",
        "batches": "#CC79A7",
        "variables": "#882255",
        "unnamed": "#999999",
    }
)
TITLES: Mapping[HoldingKind, str] = MappingProxyType(
    {"batches": "batch in flight", "variables": "your own variables", "unnamed": "not attributed"}
)
_MOST_ROWS = 6  # of one kind
_LEAST = 0.005  # share of the peak: smaller rows are summed


def title_of(kind: HoldingKind) -> str:
    return TITLES.get(kind, kind)


def memory_section(run: Run) -> Section:
    """The peak by owners if a ledger was taken, and the peaks that the meters saw."""
    memory, peak = run.memory, memory_peak(run)
    pairs = [("peak of the process and its workers", gib(memory.peak_rss_bytes))]
    if run.device.kind == "cuda":
        pairs += [
            ("peak allocated by tensors on the GPU", gib(memory.peak_allocated_bytes)),
            ("peak reserved by PyTorch on the GPU", gib(memory.peak_reserved_bytes)),
        ]
    pairs.append((f"memory of the {'machine' if run.device.kind == 'cpu' else 'GPU'}", gib(memory.total_bytes)))
    most = memory.peak_rss_bytes if run.device.kind == "cpu" else memory.peak_reserved_bytes
    result = f"peak {gib(most)} of {gib(memory.total_bytes)}" if most is not None else NOT_MEASURABLE
    columns = (Column("", "cut"), *numbers("size", "share"), Column("where", "wrap"))
    rows = [Row((name, value, "", "")) for name, value in pairs]
    if peak is None:
        return Section.table("Memory", PAIRS, pairs, result=result)
    largest = ", ".join(f"{title_of(kind)} {percent(peak.share(count))}" for kind, count in peak.by_kind[:3])
    moment = "before the backward pass" if peak.ledger.moment == "backward" else "before the optimizer's step"
    what = "The allocator's peak" if peak.bytes > peak.ledger.bytes else "All live tensors"
    lines = (
        f"{what}: {size(peak.bytes)}. Owners: step {peak.ledger.step + 1}, {moment}; each storage counts once.",
        *([_rest_of_process(run, peak)] if run.device.kind == "cpu" and memory.peak_rss_bytes else []),
    )
    return _without_empty_column(
        Section(
            "Memory",
            columns,
            (*_peak_rows(peak), *rows),
            lines,
            result=f"{result}; of {size(peak.bytes)} in tensors: {largest}",
            drawing=_drawing(ledgers_of(run)),
        )
    )


def _without_empty_column(section: Section) -> Section:
    """The section without its last column, if no row has anything there."""
    if not section.rows or any(row.cells[-1] for row in section.rows):
        return section
    rows = tuple(replace(row, cells=row.cells[:-1]) for row in section.rows)
    return replace(section, columns=section.columns[:-1], rows=rows)


def _rest_of_process(run: Run, peak: PeakMemory) -> str:
    rest = (run.memory.peak_rss_bytes or 0) - peak.bytes
    return f"The rest of the process, {size(max(0, rest))}: Python, libraries, workspaces, and freed memory it keeps."


def _peak_rows(peak: PeakMemory) -> Iterable[Row]:
    for kind, count in peak.by_kind:
        yield Row((title_of(kind), size(count), percent(peak.share(count)), ""), peak.share(count), COLOURS[kind])
        yield from holding_rows(peak.rows(kind), peak.bytes, detail=True)
    if peak.unknown_bytes:
        words = "not attributed: other steps, workspaces"
        yield Row((words, size(peak.unknown_bytes), percent(peak.share(peak.unknown_bytes)), ""))
    if peak.reserve_bytes:
        yield Row(("the allocator's reserve, on top", size(peak.reserve_bytes), "", "cached, for later tensors"))


def holding_rows(holdings: Sequence[Holding], total: int, *, detail: bool = False) -> Iterable[Row]:
    """The largest holdings, one row each; the rest as one row."""
    shown = [h for h in holdings[:_MOST_ROWS] if h.bytes >= _LEAST * total]
    for holding in shown:
        where = plain(holding.line) if holding.line else _also(holding)
        share = percent(holding.bytes / total) if total else ""
        yield Row((f"   {plain(holding.owner)}", size(holding.bytes), share, where), detail=detail)
    rest = holdings[len(shown) :]
    if shown and rest:
        yield Row((f"   {plural(len(rest), 'more owner')}", size(sum(h.bytes for h in rest)), "", ""), detail=detail)


def _also(holding: Holding) -> str:
    names = holding.others[:3]
    more = f" and {len(holding.others) - 3} more" if len(holding.others) > 3 else ""
    return f"also held by {', '.join(map(plain, names))}{more}" if names else ""


def _drawing(ledgers: Sequence[Ledger]) -> str:
    """Memory by kind over the steps, and what the colours mean; empty with fewer than two steps."""
    steps = over_steps(ledgers)
    if len(steps) < 2:
        return ""
    chart = memory_chart(steps)
    bars = macros("bars.html")
    legend = [Segment(line.label, 0.0, line.colour) for line in chart.lines]
    return Markup(bars.panel(chart.title, chart.paths, chart.height_px, chart.below) + bars.legend(legend))


def memory_chart(steps: Sequence[Ledger]) -> Chart:
    """Stacked areas: each step with a ledger keeps its height until the next."""
    numbers_ = [ledger.step + 1 for ledger in steps]
    last = numbers_[-1] + max(1, max((b - a for a, b in pairwise(numbers_)), default=1) // 4)
    x = np.array([*numbers_, last], np.float64) - numbers_[0]
    top = 1.05 * max(ledger.bytes for ledger in steps)
    lines = tuple(
        Line(title_of(kind), COLOURS[kind], x, np.array([*(ledger.of(kind) for ledger in steps), 0], np.float64))
        for kind in KINDS
        if any(ledger.of(kind) for ledger in steps)
    )
    title = f"Tensor memory over the steps, 0 to {size(top)} ({plural(len(steps), 'ledger')})"
    below = f"from step {numbers_[0]} to step {numbers_[-1]}"
    return Chart(title, below, "step", float(x[-1]), "B", 0.0, top, lines, stacked=True, height_px=84)


def failure_section(failure: OutOfMemory) -> Section:
    """Who held the memory when it ran out."""
    total = sum(holding.bytes for holding in failure.holdings)
    rows = tuple(holding_rows(failure.holdings, total))
    pool = failure.pool
    lines = [f"{size(total)} in live tensors on {plain(failure.device)} when the error arrived."]
    if (room := failure.room) is not None:
        lines.append(f"Free: {size(room.free_bytes)} of {size(room.total_bytes)} ({room.limit}).")
    if pool is not None:
        lines.append(
            f"Allocator: {size(pool.allocated_bytes)} in use, {size(pool.reserved_bytes)} taken from the driver, "
            f"largest free block {size(pool.largest_free_bytes)}, cache emptied {plural(pool.retries, 'time')}."
        )
    columns = (Column("owner", "cut"), *numbers("size", "share"), Column("", "wrap")) if rows else ()
    held = Section("Who held the memory", columns, rows, tuple(lines), lead=True, result=f"{size(total)} in tensors")
    return _without_empty_column(held)
