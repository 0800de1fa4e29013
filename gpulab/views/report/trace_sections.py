"""The sections that a GPU trace adds to a report: whether it can be trusted, and how its work was launched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpulab.analysis.collectives import CollectiveFacts
from gpulab.analysis.facts import Facts, TraceFacts
from gpulab.analysis.integrity import Integrity
from gpulab.analysis.kernels import SHORT_KERNEL_US, CopyRow, Kernels
from gpulab.analysis.step_shares import shares_on
from gpulab.formatting import NOT_MEASURABLE, duration, number, percent, plural, reading, size
from gpulab.run import Damage
from gpulab.timeline.memory_curve import HOST, MemoryCurve
from gpulab.views.layout import PAIRS, Column, Section, numbers
from gpulab.views.wording import plain

_VERDICTS = {
    "ok": "No problem found in this trace.",
    "degraded": "Something is wrong with this trace.",
    "unusable": "This trace supports no conclusion about the GPU.",
}
_NO_MATTER = "None of this affects the figures."


def trace_sections(facts: Facts) -> Iterator[Section]:
    """The sections of a run whose trace holds a GPU's work, or which was loaded from a file."""
    run, trace = facts.run, facts.trace
    if facts.integrity is not None and (trace is not None or run.origin is not None):
        yield _trust(facts.integrity, run.origin.damage if run.origin else ())
    if trace is not None:
        yield from _gpu(facts, trace)
    if facts.memory:
        yield _memory(facts.memory)
    if trace is not None and len(trace.devices) > 1:
        yield _devices(facts, trace)


def _gpu(facts: Facts, trace: TraceFacts) -> Iterator[Section]:
    account = facts.breakdown
    steps = len(account.steps) if account else 1
    per = "in the whole trace" if account is None or account.whole_window else "per step"
    if trace.kernels is not None:
        yield _gpu_work(trace, trace.kernels, steps, per)
    if trace.copies:
        yield _copies(trace.copies, steps, per)
    if trace.exchanges:
        yield exchanges_section(trace.exchanges, per, waits_included=True)


def _trust(integrity: Integrity, damage: Sequence[Damage]) -> Section:
    names = {check.name: check.name.replace("_", " ") for check in integrity.checks}
    rows = [
        (names[check.name], f"{check.count:,}", check.meaning or "none found")
        for check in integrity.checks
        if check.count
    ]
    rows += [(plain(d.name), f"{d.count:,}", plain(d.detail)) for d in damage if d.name not in names.values()]
    withheld = sorted(figure.replace("_", " ") for figure in integrity.withheld)
    lines = [_NO_MATTER if integrity.state == "ok" and rows else _VERDICTS[integrity.state]]
    if withheld:
        lines.append(f"Left out for this reason: {', '.join(withheld)}.")
    columns = (Column("looked for"), *numbers("found"), Column("what it means", "wrap"))
    title, doubtful = "Can this trace be trusted?", integrity.state != "ok"
    return Section.table(
        title, columns if rows else (), rows, lines, aside=not doubtful, result=lines[0] if doubtful else ""
    )


def _gpu_work(trace: TraceFacts, kernels: Kernels, steps: int, per: str) -> Section:
    launches, occupancy_pct = trace.launches, kernels.est_achieved_occupancy_pct
    short, of_time = percent(kernels.short_count_fraction), percent(kernels.short_time_fraction)
    rows = [
        (f"kernels {per}", number(kernels.count / steps)),
        ("time in tensor-core kernels (by name)", percent(kernels.tensor_core_fraction)),
        (f"kernels shorter than {duration(SHORT_KERNEL_US)}", f"{short} ({of_time} of kernel time)"),
        ("est. SM efficiency", percent(trace.est_sm_efficiency)),
        ("est. achieved occupancy", percent(None if occupancy_pct is None else occupancy_pct / 100)),
    ]
    if launches is not None:
        rows += [
            (f"launches {per}", number(launches.count / steps)),
            ("launch call on the CPU, median", duration(launches.median_us)),
            ("launch to kernel start, median", duration(launches.median_queue_delay_us)),
        ]
        if launches.kernels_without_launch:
            rows.append(("kernels launched before the trace began", f"{launches.kernels_without_launch:,}"))
    lines = ("A long time from launch to kernel start means that work is queued and the GPU doesn't wait for the CPU.",)
    result = f"{rows[0][1]} {rows[0][0]}, {short} shorter than {duration(SHORT_KERNEL_US)}"
    return Section.table("How the GPU was used", PAIRS, rows, lines, result=result)


def _copies(copies: Sequence[CopyRow], steps: int, per: str) -> Section:
    columns = (Column(""), Column("host memory"), *numbers("time", "size", "speed"))
    cells = (
        (
            _DIRECTIONS.get(row.kind, plain(row.kind)),
            row.host_memory or "–",
            duration(row.time_us / steps),
            size(None if row.bytes is None else row.bytes / steps),
            NOT_MEASURABLE if row.gb_per_s is None else reading(row.gb_per_s, "GB/s"),
        )
        for row in copies
    )
    lines = [f"Time and size {per}."]
    if any(row.host_memory == "pageable" for row in copies):
        lines.append("Copies from pageable memory block the CPU; pin_memory=True in the DataLoader pins it.")
    result = f"{duration(sum(row.time_us for row in copies) / steps)} {per}"
    return Section.table("Copies", columns, cells, lines, result=result)


def exchanges_section(exchanges: Sequence[CollectiveFacts], per: str, *, waits_included: bool) -> Section:
    """What ranks exchange, by kind and process group. `waits_included`: times include waits."""
    columns = (Column(""), Column("process group"), *numbers("count", "size of one", "time of one", "bus bandwidth"))
    cells = [
        (
            exchange.kind,
            _group(exchange),
            number(exchange.count_per_step),
            size(exchange.message_bytes),
            duration(exchange.time_us),
            NOT_MEASURABLE if exchange.bus_bytes_per_s is None else reading(exchange.bus_bytes_per_s / 1e9, "GB/s"),
        )
        for exchange in exchanges
    ]
    lines = [
        f"Count {per}; size and time are means. Bus bandwidth as nccl-tests define it: compare it with the "
        "link's specification."
    ]
    if waits_included:
        lines.append("The time includes waiting for other ranks, so the bandwidth may be higher.")
    costliest = exchanges[0]
    result = f"{number(costliest.count_per_step)} × {cells[0][0]} {per}"
    if costliest.bus_bytes_per_s is not None:
        least = "at least " if waits_included else ""
        result += f", {least}{reading(costliest.bus_bytes_per_s / 1e9, 'GB/s')} on the bus"
    return Section.table("Communication with other ranks", columns, cells, lines, result=result)


def _group(exchange: CollectiveFacts) -> str:
    group = "" if exchange.process_group is None else f"{exchange.process_group}"
    ranks = "" if exchange.group_size is None else plural(exchange.group_size, "rank")
    return ", ".join(filter(None, (group, ranks))) or NOT_MEASURABLE


_DIRECTIONS = {
    "HtoD": "CPU to GPU",
    "DtoH": "GPU to CPU",
    "DtoD": "within the GPU",
    "PtoP": "GPU to GPU",
    "HtoH": "within the CPU",
}


def _memory(curves: Sequence[MemoryCurve]) -> Section:
    columns = (Column(""), *numbers("peak", "at", "allocations", "kept at the end"))
    cells = (
        (
            "host memory" if c.device_index == HOST else f"GPU {c.device_index}",
            size(c.peak_bytes) + ("" if c.absolute else " above the start"),
            duration(c.peak_t_ns / 1e3),
            f"{c.allocations:,}",
            size(c.growth_bytes),
        )
        for c in curves
    )
    highest = max(curves, key=lambda c: c.peak_bytes)
    result = f"peak {size(highest.peak_bytes)}{'' if highest.absolute else ' above the start'}"
    return Section.table("Memory over the trace", columns, cells, ("Held by PyTorch's allocators.",), result=result)


def _devices(facts: Facts, trace: TraceFacts) -> Section:
    columns = (Column("GPU"), *numbers("busy", "computing", "exchanging"))
    cells = (
        (
            f"{account.device_index}",
            percent(account.busy_fraction),
            *(percent(shares_on(facts, account).share[part]) for part in ("compute", "communication")),
        )
        for account in sorted(trace.devices, key=lambda a: a.device_index or 0)
    )
    busy = ", ".join(percent(account.busy_fraction) for account in trace.devices)
    return Section.table("GPUs of this trace, each on its own", columns, cells, result=f"busy {busy}")
