"""What the GPU ran and who asked for it: kernels, launches, copies.

All are counted where the host called ("launched by" the windows); a kernel or copy without a launch in the trace counts
where it began. All times are sums over streams and devices: shares are of that sum, never of wall time.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
from msgspec import Struct

from gpulab.analysis.collectives import CollectiveFacts, collective_facts
from gpulab.analysis.gpu.device_work import names_tell
from gpulab.intervals import Intervals, covers
from gpulab.run import Category, Int64, Timeline
from gpulab.timeline import spans
from gpulab.timeline.device_steps import called_ns
from gpulab.timeline.kernel_names import reading
from gpulab.timeline.launches import CallTree, launch_of

SHORT_KERNEL_US = 10.0  # definitions.md, "Step on a GPU": a launch costs more
UNKNOWN_AT_MOST = 0.01  # ours: of the time of all kernels

_COPY = re.compile(r"Memcpy (\w+)(?: \((\w+) -> (\w+)\))?")
_HOST_MEMORY = {"Pageable": "pageable", "Pinned": "pinned"}


class Launches(Struct, frozen=True):
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


class CopyRow(Struct, frozen=True):
    """All copies of one kind. `bytes` and `gb_per_s` (10⁹ bytes per second of copying) are None without sizes."""

    kind: str  # HtoD, DtoH, DtoD, PtoP, …
    host_memory: str | None  # "pageable" or "pinned"; None: no host memory, or not said
    count: int
    time_us: float
    bytes: int | None
    gb_per_s: float | None


class Kernels(Struct, frozen=True):
    """What ran on the device. Fractions are 0–1, None where there is no kernel or the trace cannot tell."""

    count: int
    tensor_core_fraction: float | None  # of kernel time; None where names do not tell it of more than 1 % of the time
    short_count_fraction: float | None
    short_time_fraction: float | None
    est_achieved_occupancy_pct: float | None


def kernels(timeline: Timeline, windows: Intervals) -> Kernels:
    rows = _launched(timeline, np.flatnonzero(spans.in_category(timeline, Category.KERNEL)), windows)
    duration, count = timeline.duration_ns[rows], len(rows)
    time_ns, short = int(duration.sum()), duration < SHORT_KERNEL_US * 1e3
    return Kernels(
        count=count,
        tensor_core_fraction=_tensor_core_fraction(timeline, rows),
        short_count_fraction=float(short.mean()) if count else None,
        short_time_fraction=float(duration[short].sum() / time_ns) if time_ns else None,
        est_achieved_occupancy_pct=_mean_occupancy_pct(timeline, rows),
    )


def short_count_fraction(timeline: Timeline, windows: Intervals, below_us: float) -> float | None:
    """Of the kernels launched within the windows, those shorter than that; None where there is no kernel."""
    rows = _launched(timeline, np.flatnonzero(spans.in_category(timeline, Category.KERNEL)), windows)
    return float((timeline.duration_ns[rows] < below_us * 1e3).mean()) if len(rows) else None


def launches(timeline: Timeline, windows: Intervals) -> Launches:
    """Kernel launches that the host made within the windows; kernels without a launch are those of the whole trace."""
    calling = spans.runtime_calls(timeline) & spans.named(
        timeline, lambda name: spans.is_kernel_launch(name) or spans.is_graph_launch(name)
    )
    calls = np.flatnonzero(calling)
    calls = calls[covers(windows, timeline.start_ns[calls])]
    items = np.flatnonzero(spans.device_items(timeline))
    call = launch_of(timeline, items)
    stray = (call < 0) & (timeline.category[items] == Category.KERNEL)
    started, first, how_many = np.unique(call[call >= 0], return_index=True, return_counts=True)
    mine = np.isin(started, calls, assume_unique=True)
    begins = timeline.start_ns[items[call >= 0][first[mine]]]
    delay = np.maximum(0, begins - timeline.end_ns[started[mine]])
    return Launches(
        count=len(calls),
        per_step=len(calls) / len(windows) if len(windows) else None,
        median_us=_median_us(timeline.duration_ns[calls]),
        median_queue_delay_us=_median_us(delay),
        without_kernel=len(calls) - int(mine.sum()),
        kernels_without_launch=int(stray.sum()),
        most_kernels_per_launch=int(how_many[mine].max(initial=0)),
    )


def copies(timeline: Timeline, windows: Intervals) -> tuple[CopyRow, ...]:
    """Copies launched within the windows, by kind and by the host memory they touch; the costliest first."""
    rows = _launched(timeline, np.flatnonzero(spans.in_category(timeline, Category.GPU_MEMCPY)), windows)
    names, group = np.unique(timeline.name_id[rows], return_inverse=True)
    kinds: dict[tuple[str, str | None], int] = {}
    kind_of_name = [kinds.setdefault(_copy_kind(timeline.names[i]), len(kinds)) for i in names.tolist()]
    kind = np.array(kind_of_name, dtype=np.int64)[group]
    table = [_copy_row(timeline, key, rows[kind == number]) for key, number in kinds.items()]
    return tuple(sorted(table, key=lambda row: -row.time_us))


def exchanges(timeline: Timeline, windows: Intervals, steps: int) -> tuple[CollectiveFacts, ...]:
    """Kernels launched within the windows that say what they exchange with other ranks; the costliest kind first."""
    if "collective" not in timeline.extra:
        return ()
    kernels = spans.in_category(timeline, Category.KERNEL) & np.isfinite(timeline.extra["collective"])
    rows = _launched(timeline, np.flatnonzero(kernels), windows)
    return collective_facts(timeline, rows, timeline.duration_ns[rows], steps)


def _launched(timeline: Timeline, rows: Int64, windows: Intervals) -> Int64:
    """Rows of a device whose launch lies within the windows."""
    return rows[covers(windows, called_ns(timeline, rows))]


def _tensor_core_fraction(timeline: Timeline, rows: Int64) -> float | None:
    if not names_tell(timeline):
        return None
    time_ns = np.bincount(timeline.name_id[rows], weights=timeline.duration_ns[rows]).tolist()
    by_use: Counter[bool | None] = Counter()
    for i in np.unique(timeline.name_id[rows]).tolist():
        by_use[reading(timeline.names[i]).tensor_cores] += time_ns[i]
    total_ns = by_use.total()
    return by_use[True] / total_ns if total_ns and by_use[None] <= UNKNOWN_AT_MOST * total_ns else None


def _mean_occupancy_pct(timeline: Timeline, rows: Int64) -> float | None:
    """Weighted by duration; None where no kernel with a duration has the figure."""
    occupancy_pct = timeline.extra.get("occupancy_pct")
    if occupancy_pct is None:
        return None
    measured = rows[occupancy_pct[rows] >= 0]
    weight = timeline.duration_ns[measured]
    return float((occupancy_pct[measured] * weight).sum() / weight.sum()) if weight.any() else None


def est_sm_efficiency(timeline: Timeline, device_index: int, span_ns: tuple[int, int]) -> float | None:
    """Blocks per multiprocessor of the kernels running together, at most 1: the mean over the whole span of time.

    As the TensorBoard plugin estimates it; None where no kernel of the span has the figure.
    """
    blocks_per_sm = timeline.extra.get("blocks_per_sm")
    if blocks_per_sm is None:
        return None
    start, end = span_ns
    mine = spans.in_category(timeline, Category.KERNEL) & spans.on_device(timeline, device_index) & (blocks_per_sm > 0)
    rows = np.flatnonzero(mine & (timeline.end_ns > start) & (timeline.start_ns < end))
    if not len(rows):
        return None
    edges = np.concatenate((timeline.start_ns[rows], timeline.end_ns[rows]))
    change = np.concatenate((blocks_per_sm[rows], -blocks_per_sm[rows]))
    order = np.argsort(edges, kind="stable")
    running = np.clip(np.cumsum(change[order])[:-1], 0.0, 1.0)
    return float((running * np.diff(np.clip(edges[order], start, end))).sum() / (end - start))


def launched_ns(timeline: Timeline, tree: CallTree) -> Int64:
    """For each row of the timeline, time on the device of what it launched itself as a row of the tree.

    A launch belongs to the innermost operator open on its thread; what has no launch in the trace belongs to none.
    """
    items = np.flatnonzero(spans.device_items(timeline))
    call = launch_of(timeline, items)
    items, call = items[call >= 0], call[call >= 0]
    owner = tree.innermost(timeline, call)
    launched = np.zeros(len(timeline), dtype=np.int64)
    np.add.at(launched, owner[owner >= 0], timeline.duration_ns[items[owner >= 0]])
    return launched


def _median_us(values_ns: Int64) -> float | None:
    return float(np.median(values_ns)) / 1e3 if len(values_ns) else None


def _copy_kind(name: str) -> tuple[str, str | None]:
    """Kind and host memory from "Memcpy HtoD (Pageable -> Device)"."""
    match = _COPY.match(name)
    if match is None:
        return "unknown", None
    ends = [_HOST_MEMORY.get(end or "") for end in match.groups()[1:]]
    return match[1], ends[0] or ends[1]


def _copy_row(timeline: Timeline, kind: tuple[str, str | None], rows: Int64) -> CopyRow:
    column = timeline.extra.get("bytes")
    size = np.full(len(rows), np.nan) if column is None else column[rows]
    duration = timeline.duration_ns[rows]
    recorded = size >= 0
    moved, taken_ns = float(size[recorded].sum()), int(duration[recorded].sum())
    return CopyRow(
        kind=kind[0],
        host_memory=kind[1],
        count=len(rows),
        time_us=int(duration.sum()) / 1e3,
        bytes=int(moved) if recorded.any() else None,
        gb_per_s=moved / taken_ns if taken_ns else None,
    )
