"""What the GPU ran and who asked for it: kernels by name, operators by what they launched, launches, copies.

All are counted where the host called ("launched by" the windows); a kernel or copy without a launch in the trace counts
where it began. Without windows the whole timeline counts. All times are sums over streams and devices: shares are of
that sum, never of wall time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from gpulab.analysis.gpu.tensor_cores import names_tell, uses_tensor_cores
from gpulab.intervals import Intervals, covers
from gpulab.run import DEVICE_CATEGORIES, Category, Float64, Int64, Timeline
from gpulab.timeline import spans
from gpulab.timeline.device_steps import called_ns
from gpulab.timeline.launches import LAUNCHING, CallTree, launch_of

SHORT_KERNEL_US = 10.0  # definitions.md, "Step on a GPU": a launch costs more
NO_OPERATOR = "(launched outside any operator)"
UNKNOWN_AT_MOST = 0.01  # ours: of the time of all kernels

_COPY = re.compile(r"Memcpy (\w+)(?: \((\w+) -> (\w+)\))?")
_HOST_MEMORY = {"Pageable": "pageable", "Pinned": "pinned"}


@dataclass(frozen=True, slots=True)
class KernelRow:
    """All kernels of one name. Times in microseconds; `share` is of all kernels' time. None is "not measurable"."""

    name: str
    count: int
    time_us: float
    mean_us: float
    min_us: float
    max_us: float
    share: float
    tensor_core: bool | None
    blocks_per_sm: float | None  # mean, weighted by duration, like the next
    est_achieved_occupancy_pct: float | None


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """All calls of one operator. Times in microseconds, over all calls.

    host_self_us: in the operator itself, without the operators within it. device_self_us: kernels, copies and memsets
    launched by it directly; device_total_us: also by the operators within it (an operator within one of its own name
    counts in both). `kernels` is how many items it launched directly.
    """

    name: str
    calls: int
    host_self_us: float
    host_total_us: float
    device_self_us: float
    device_total_us: float
    kernels: int
    mean_us: float  # of host time per call, like the next two
    min_us: float
    max_us: float


@dataclass(frozen=True, slots=True)
class Launches:
    """Kernel launches (graph launches too). None where there is none to measure.

    queue_delay_us: from the end of a launch to the start of the first kernel it started, 0 where that began earlier.
    """

    count: int
    per_step: float | None
    median_us: float | None
    median_queue_delay_us: float | None
    without_kernel: int
    kernels_without_launch: int
    most_kernels_per_launch: int  # more than one: graph replays


@dataclass(frozen=True, slots=True)
class CopyRow:
    """All copies of one kind. `bytes` and `gb_per_s` (10⁹ bytes per second of copying) are None without sizes."""

    kind: str  # HtoD, DtoH, DtoD, PtoP, …
    host_memory: str | None  # "pageable" or "pinned"; None: no host memory, or not said
    count: int
    time_us: float
    bytes: int | None
    gb_per_s: float | None


@dataclass(frozen=True, slots=True)
class Kernels:
    """What ran on the device. Fractions are 0–1, None where there is no kernel or the trace cannot tell."""

    count: int
    time_us: float
    rows: tuple[KernelRow, ...]  # costliest first
    tensor_core_fraction: float | None  # of kernel time; None where names do not tell it of more than 1 % of the time
    short_count_fraction: float | None
    short_time_fraction: float | None
    est_achieved_occupancy_pct: float | None


def kernels(timeline: Timeline, windows: Intervals | None = None) -> Kernels:
    """Kernels launched within the windows, by name."""
    rows = _launched(timeline, np.flatnonzero(spans.in_category(timeline, Category.KERNEL)), windows)
    duration = timeline.duration_ns[rows]
    time_ns, count = int(duration.sum()), len(rows)
    table = _kernel_rows(timeline, rows)
    short = duration < SHORT_KERNEL_US * 1e3
    return Kernels(
        count=count,
        time_us=time_ns / 1e3,
        rows=table,
        tensor_core_fraction=_tensor_core_fraction(table),
        short_count_fraction=float(short.mean()) if count else None,
        short_time_fraction=float(duration[short].sum() / time_ns) if time_ns else None,
        est_achieved_occupancy_pct=_mean_per_group(timeline, "occupancy_pct", rows, np.zeros_like(rows), 1)[0],
    )


def short_count_fraction(timeline: Timeline, windows: Intervals, below_us: float) -> float | None:
    """Of the kernels launched within the windows, those shorter than that; None where there is no kernel."""
    rows = _launched(timeline, np.flatnonzero(spans.in_category(timeline, Category.KERNEL)), windows)
    return float((timeline.duration_ns[rows] < below_us * 1e3).mean()) if len(rows) else None


def operators(timeline: Timeline, windows: Intervals | None = None) -> tuple[OperatorRow, ...]:
    """Host operators that began within the windows, with what they launched; the costliest on the device first.

    What was launched outside any operator has a row of its own, `NO_OPERATOR`, without host time.
    """
    every = np.flatnonzero(spans.in_category(timeline, Category.CPU_OP))
    tree = CallTree.of(timeline, every)
    own_device, launched, stray_ns, strays = _device_time(timeline, tree, windows)
    counted = _is_within(timeline, tree.rows, windows)
    names, group = np.unique(timeline.name_id[tree.rows[counted]].astype(np.int64), return_inverse=True)
    size = len(names)

    def per_name(column: Int64) -> Int64:
        total: Int64 = np.bincount(group, weights=column[counted], minlength=size).astype(np.int64)
        return total

    host = timeline.duration_ns[tree.rows]
    lowest, highest = _extremes(host[counted], group, size)
    columns = (
        per_name(tree.self_ns(timeline)),
        per_name(host),
        per_name(own_device),
        per_name(tree.with_nested(own_device)),
        lowest,
        highest,
    )
    calls = np.bincount(_group(timeline, _within(timeline, every, windows), names), minlength=size)
    launches = per_name(launched)
    rows = [
        _operator_row(timeline.names[names[i]], int(calls[i]), int(launches[i]), [int(c[i]) for c in columns])
        for i in range(size)
    ]
    if strays:
        rows.append(OperatorRow(NO_OPERATOR, 0, 0.0, 0.0, stray_ns / 1e3, stray_ns / 1e3, strays, 0.0, 0.0, 0.0))
    return tuple(sorted(rows, key=lambda row: (-row.device_self_us, -row.host_self_us, row.name)))


def launches(timeline: Timeline, windows: Intervals | None = None) -> Launches:
    """Kernel launches that the host made within the windows; kernels without a launch are those of the whole trace."""
    calling = spans.in_category(timeline, *LAUNCHING)
    calling &= spans.named(timeline, lambda name: spans.is_kernel_launch(name) or spans.is_graph_launch(name))
    calls = _within(timeline, np.flatnonzero(calling), windows)
    items = np.flatnonzero(spans.in_category(timeline, *DEVICE_CATEGORIES))
    call = launch_of(timeline, items)
    stray = (call < 0) & (timeline.category[items] == Category.KERNEL)
    started, first, how_many = np.unique(call[call >= 0], return_index=True, return_counts=True)
    mine = np.isin(started, calls, assume_unique=True)
    begins = timeline.start_ns[items[call >= 0][first[mine]]]
    delay = np.maximum(0, begins - timeline.end_ns[started[mine]])
    return Launches(
        count=len(calls),
        per_step=len(calls) / len(windows) if windows is not None and len(windows) else None,
        median_us=_median_us(timeline.duration_ns[calls]),
        median_queue_delay_us=_median_us(delay),
        without_kernel=len(calls) - int(mine.sum()),
        kernels_without_launch=int(stray.sum()),
        most_kernels_per_launch=int(how_many[mine].max(initial=0)),
    )


def copies(timeline: Timeline, windows: Intervals | None = None) -> tuple[CopyRow, ...]:
    """Copies launched within the windows, by kind and by the host memory they touch; the costliest first."""
    rows = _launched(timeline, np.flatnonzero(spans.in_category(timeline, Category.GPU_MEMCPY)), windows)
    names, group = np.unique(timeline.name_id[rows], return_inverse=True)
    kinds: dict[tuple[str, str | None], int] = {}
    kind_of_name = [kinds.setdefault(_copy_kind(timeline.names[i]), len(kinds)) for i in names.tolist()]
    kind = np.array(kind_of_name, dtype=np.int64)[group]
    found = [_copy_row(timeline, key, rows[kind == number]) for key, number in kinds.items()]
    return tuple(sorted(found, key=lambda row: -row.time_us))


def _within(timeline: Timeline, rows: Int64, windows: Intervals | None) -> Int64:
    return rows[_is_within(timeline, rows, windows)]


def _launched(timeline: Timeline, rows: Int64, windows: Intervals | None) -> Int64:
    """Rows of a device whose launch lies within the windows."""
    return rows if windows is None else rows[covers(windows, called_ns(timeline, rows))]


def _is_within(timeline: Timeline, rows: Int64, windows: Intervals | None) -> spans.Mask:
    if windows is None:
        return np.ones(len(rows), dtype=bool)
    return covers(windows, timeline.start_ns[rows])


def _tensor_core_fraction(table: tuple[KernelRow, ...]) -> float | None:
    total_us = sum(row.time_us for row in table)
    unknown_us = sum(row.time_us for row in table if row.tensor_core is None)
    if not total_us or unknown_us > UNKNOWN_AT_MOST * total_us:
        return None
    return sum(row.time_us for row in table if row.tensor_core) / total_us


def _kernel_rows(timeline: Timeline, rows: Int64) -> tuple[KernelRow, ...]:
    if len(rows) == 0:
        return ()
    names, group = np.unique(timeline.name_id[rows], return_inverse=True)
    duration, size = timeline.duration_ns[rows], len(names)
    count = np.bincount(group, minlength=size).tolist()
    time_us = (np.bincount(group, weights=duration, minlength=size) / 1e3).tolist()
    lowest, highest = (column.tolist() for column in _extremes(duration, group, size))
    blocks = _mean_per_group(timeline, "blocks_per_sm", rows, group, size)
    occupancy = _mean_per_group(timeline, "occupancy_pct", rows, group, size)
    told, total_us = names_tell(timeline), int(duration.sum()) / 1e3
    return tuple(
        KernelRow(
            name=timeline.names[names[i]],
            count=count[i],
            time_us=time_us[i],
            mean_us=time_us[i] / count[i],
            min_us=lowest[i] / 1e3,
            max_us=highest[i] / 1e3,
            share=time_us[i] / total_us if total_us else 0.0,
            tensor_core=uses_tensor_cores(timeline.names[names[i]]) if told else None,
            blocks_per_sm=blocks[i],
            est_achieved_occupancy_pct=occupancy[i],
        )
        for i in sorted(range(size), key=lambda i: (-time_us[i], timeline.names[names[i]]))
    )


def _mean_per_group(timeline: Timeline, column: str, rows: Int64, group: Int64, size: int) -> list[float | None]:
    """Means weighted by duration; None where no row of a group with a duration has the figure."""
    values: Float64 | None = timeline.extra.get(column)
    if values is None:
        return [None] * size
    value, weight = values[rows], timeline.duration_ns[rows]
    known = value >= 0
    weights = np.bincount(group[known], weights=weight[known], minlength=size).tolist()
    weighted = np.bincount(group[known], weights=value[known] * weight[known], minlength=size).tolist()
    return [total / of if of else None for total, of in zip(weighted, weights, strict=True)]


def _device_time(timeline: Timeline, tree: CallTree, windows: Intervals | None) -> tuple[Int64, Int64, int, int]:
    """Per row of the tree: time on the device and number of items it launched itself; the same for no operator.

    A launch belongs to the innermost operator open on its thread; what has no launch in the trace belongs to none.
    """
    items = np.flatnonzero(spans.in_category(timeline, *DEVICE_CATEGORIES))
    call = launch_of(timeline, items)
    known = call >= 0
    owner = np.full(len(items), -1, dtype=np.int64)
    owner[known] = tree.innermost(timeline, call[known])
    position = np.full(len(timeline), -1, dtype=np.int64)
    position[tree.rows] = np.arange(len(tree.rows))
    owned = owner >= 0
    at, duration = position[owner[owned]], timeline.duration_ns[items]
    device = np.zeros(len(tree.rows), dtype=np.int64)
    np.add.at(device, at, duration[owned])
    asked_at = np.where(known, timeline.start_ns[call], timeline.start_ns[items])
    stray = ~owned & (covers(windows, asked_at) if windows is not None else True)
    return device, np.bincount(at, minlength=len(tree.rows)), int(duration[stray].sum()), int(stray.sum())


def launched_ns(timeline: Timeline, tree: CallTree) -> Int64:
    """Time on the device of what each row of the tree launched itself, in the order of its `rows`."""
    return _device_time(timeline, tree, None)[0]


def _group(timeline: Timeline, rows: Int64, names: Int64) -> Int64:
    """The place in `names` of each row's name; rows of other names are left out."""
    name_id = timeline.name_id[rows]
    at = np.searchsorted(names, name_id)
    known = at < len(names)
    known[known] = names[at[known]] == name_id[known]
    return at[known]


def _extremes(values: Int64, group: Int64, size: int) -> tuple[Int64, Int64]:
    lowest, highest = np.full(size, np.iinfo(np.int64).max), np.zeros(size, dtype=np.int64)
    np.minimum.at(lowest, group, values)
    np.maximum.at(highest, group, values)
    return lowest, highest


def _operator_row(name: str, calls: int, launched: int, columns: list[int]) -> OperatorRow:
    host_self, host, device_self, device, lowest, highest = (c / 1e3 for c in columns)
    return OperatorRow(
        name, calls, host_self, host, device_self, device, launched, host / calls if calls else 0.0, lowest, highest
    )


def _median_us(values_ns: Int64) -> float | None:
    return float(np.median(values_ns)) / 1e3 if len(values_ns) else None


def _copy_kind(name: str) -> tuple[str, str | None]:
    """Kind and host memory from "Memcpy HtoD (Pageable -> Device)"."""
    found = _COPY.match(name)
    if found is None:
        return "unknown", None
    ends = [_HOST_MEMORY.get(end or "") for end in found.groups()[1:]]
    return found[1], ends[0] or ends[1]


def _copy_row(timeline: Timeline, kind: tuple[str, str | None], rows: Int64) -> CopyRow:
    column = timeline.extra.get("bytes")
    size = np.full(len(rows), np.nan) if column is None else column[rows]
    duration = timeline.duration_ns[rows]
    known = size >= 0
    moved, taken_ns = float(size[known].sum()), int(duration[known].sum())
    return CopyRow(
        kind=kind[0],
        host_memory=kind[1],
        count=len(rows),
        time_us=int(duration.sum()) / 1e3,
        bytes=int(moved) if known.any() else None,
        gb_per_s=moved / taken_ns if taken_ns else None,
    )
