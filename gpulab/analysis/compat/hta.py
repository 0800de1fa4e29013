"""The figures of HolisticTraceAnalysis under its own names, so that its users find them again.

Release 0.5.0 is followed, with what it does silently: time stamps finer than a microsecond are cut to whole ones, each
span shrinking, and of several profiler steps the last is left out with all it launched. All GPUs of a trace count
together. Left out is only what it counts by mistake: waits of the host (`cuda_sync`) as work of the GPU.
"""

from __future__ import annotations

import re

import numpy as np
from msgspec import Struct

from gpulab.intervals import intersect, measure, union
from gpulab.run import Category, Float64, Int64, Timeline
from gpulab.timeline import spans
from gpulab.timeline.launches import launch_of

KERNEL_WAIT_US = 30  # consecutive_kernel_delay: its documentation says ns, its code compares microseconds

COMMUNICATION = re.compile(r"nccl.*Kernel")  # at the start of the name, as in hta.utils.utils
MEMORY = re.compile(r"Memcpy|Memset|dma")
NOT_COMPUTE = re.compile(r"nccl.*Kernel|.*Memcpy|Memset|.*Sync")


class StreamIdle(Struct, frozen=True):
    """The gaps between the items of one stream, in microseconds, by what they waited for.

    host_wait: the next launch began after the item before had ended. kernel_wait: it did not, and the gap is shorter
    than `KERNEL_WAIT_US`. other: neither. Items that overlap on a stream make a gap negative.
    """

    device: int
    stream: int
    host_wait_us: float
    kernel_wait_us: float
    other_us: float


class HtaView(Struct, frozen=True):
    """HTA's temporal breakdown, idle split and overlap.

    The window reaches from the first to the last item on the GPU, copies included; the three percentages are shares of
    it. `overlap_pct`: share of the communication kernels' time in which a compute kernel runs; None without any.
    """

    window_us: float
    idle_pct: float
    compute_pct: float
    non_compute_pct: float
    overlap_pct: float | None
    streams: tuple[StreamIdle, ...]


def hta(timeline: Timeline, zero_ns: int = 0) -> HtaView | None:
    """HTA's figures of a timeline; None where the GPU did nothing that counts.

    `zero_ns` is the time stamp that the file gives to time 0 of the timeline (without its baseTimeNanoseconds): HTA
    computes in floating point, where microseconds since 1970 have a resolution of 0.25, and its figures depend on it.
    """
    items = _items(timeline)
    if len(items) == 0:
        return None
    start, end = _whole_microseconds(timeline, items, zero_ns)
    communication, compute = _kinds(timeline, items)
    window = int(end.max() - start.min())
    if window <= 0:
        return None
    idle = window - _covered(start, end)
    computing = _covered(start[compute], end[compute])
    return HtaView(
        window_us=window / 1e3,
        idle_pct=100 * idle / window,
        compute_pct=100 * computing / window,
        non_compute_pct=100 * (window - idle - computing) / window,
        overlap_pct=_overlap_pct(start, end, communication, compute),
        streams=_streams(timeline, items, start, end, zero_ns),
    )


def _items(timeline: Timeline) -> Int64:
    """The GPU's items; with several profiler steps only those launched before the last of them began."""
    items = np.flatnonzero(spans.device_items(timeline))
    marks = spans.in_category(timeline, Category.USER_ANNOTATION, Category.CPU_OP)
    marks = marks & spans.named(timeline, spans.containing("ProfilerStep"))
    if len(np.unique(timeline.name_id[marks])) < 2:
        return items
    call = launch_of(timeline, items)
    last = timeline.start_ns[marks].max()
    chosen: Int64 = items[(call >= 0) & (timeline.start_ns[call] < last)]
    return chosen


def _whole_microseconds(timeline: Timeline, rows: Int64, zero_ns: int) -> tuple[Int64, Int64]:
    """Start and end as HTA sees them, in ns: where the trace is finer than a microsecond, start rounded up, end down.

    Whether it is shows in the durations, so that a trace in microseconds stays as it is wherever time zero lies.
    """
    start, duration = timeline.start_ns[rows], timeline.duration_ns[rows]
    if (duration % 1000 == 0).all():
        return start, start + duration
    begins_us = _float_us(start + zero_ns)
    ends_us = begins_us + duration / 1e3
    zero = zero_ns // 1000 * 1000
    return np.ceil(begins_us).astype(np.int64) * 1000 - zero, np.floor(ends_us).astype(np.int64) * 1000 - zero


def _float_us(time_ns: Int64) -> Float64:
    """The float64 nearest to a time in microseconds; dividing nanoseconds since 1970 would lose what it keeps."""
    return time_ns // 1000 + time_ns % 1000 / 1e3


def _kinds(timeline: Timeline, rows: Int64) -> tuple[spans.Mask, spans.Mask]:
    """Communication and compute, told by the name alone."""
    communication = spans.named(timeline, _communicates)
    compute = spans.named(timeline, _computes)
    return communication[rows], compute[rows]


def _communicates(name: str) -> bool:
    return COMMUNICATION.match(name) is not None


def _computes(name: str) -> bool:
    return not (MEMORY.match(name) or NOT_COMPUTE.match(name))


def _covered(start: Int64, end: Int64) -> int:
    """The time covered, where a span that rounding has turned around takes from it as in HTA."""
    if len(start) == 0:
        return 0
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    opens = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1])))
    closes = np.concatenate((opens[1:] - 1, [len(start) - 1]))
    return int((reach[closes] - start[opens]).sum())


def _overlap_pct(start: Int64, end: Int64, communication: spans.Mask, compute: spans.Mask) -> float | None:
    talking = union(start[communication], end[communication])
    if len(talking) == 0:
        return None
    return 100 * measure(intersect(talking, union(start[compute], end[compute]))) / measure(talking)


def _streams(timeline: Timeline, items: Int64, start: Int64, end: Int64, zero_ns: int) -> tuple[StreamIdle, ...]:
    call = launch_of(timeline, items)
    launched = np.full(len(items), np.iinfo(np.int64).min)  # unknown: not waited for
    launched[call >= 0], _ = _whole_microseconds(timeline, call[call >= 0], zero_ns)
    lane_id = timeline.lane_id[items]
    return tuple(
        _stream(timeline, lane, start[rows], end[rows], launched[rows])
        for lane in np.unique(lane_id).tolist()
        for rows in [np.flatnonzero(lane_id == lane)]
    )


def _stream(timeline: Timeline, lane: int, start: Int64, end: Int64, launched: Int64) -> StreamIdle:
    gap = start[1:] - end[:-1]
    host = launched[1:] > end[:-1]
    kernel = ~host & (gap < KERNEL_WAIT_US * 1000)
    where = timeline.lanes[lane]
    return StreamIdle(
        device=where.process,
        stream=where.number,
        host_wait_us=float(gap[host].sum() / 1e3),
        kernel_wait_us=float(gap[kernel].sum() / 1e3),
        other_us=float(gap[~host & ~kernel].sum() / 1e3),
    )
