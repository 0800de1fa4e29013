"""Assigns a device's work to calls of the host and to steps.

The host may run far ahead of the device, so a step has two windows. On the host it lasts from one boundary of the
training loop to the next. On the device it begins as soon as all work that was launched before it has ended, and not
before its begin on the host. If the host waits for the device in each step, both windows are the same; if the host
never waits, they are about a thousand launches apart.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpulab.intervals import EMPTY, Intervals, covers, joined, subtract, union
from gpulab.run import Int64, Run, StepFlag, Timeline
from gpulab.timeline.labels import KERNELS, WAITS, WORK, Labels, Rows, What, labels, once

LATE_NS = 1_000_000  # ours: a launch reaches an idle GPU, and a wait ends after its last work, within 5 to 50 µs
NOTHING_NS = np.iinfo(np.int64).min


def replay_of(spans: Labels, rows: Rows) -> Int64:
    """For each of the rows (device work), the row of the call that replayed it in a graph; -1 for all others.

    If the calls share no correlation with any work (as in some HIP traces), work without a launch that begins after
    such a call is assigned to it.
    """
    calls = spans.rows(What.GRAPH_LAUNCH)
    none = np.full(len(rows), -1, dtype=np.int64)
    if not len(calls) or not len(rows):
        return none
    launch = spans.call[rows]
    by_correlation = np.where((launch >= 0) & (spans.what[launch] == What.GRAPH_LAUNCH), launch, -1)
    if (by_correlation >= 0).any():
        return by_correlation
    before = np.searchsorted(spans.start_ns[calls], spans.start_ns[rows], side="right") - 1
    return np.where((launch < 0) & (before >= 0), calls[np.maximum(before, 0)], none)


@once
def replay_times(spans: Labels, index: int) -> Intervals:
    """From the begin of the first to the end of the last work of each replay on that device, merged."""
    rows = np.flatnonzero(spans.on_device(index))
    replay = replay_of(spans, rows)
    rows, replay = rows[replay >= 0], replay[replay >= 0]
    if not len(rows):
        return EMPTY
    calls, of_call = np.unique(replay, return_inverse=True)
    begin = np.full(len(calls), np.iinfo(np.int64).max)
    end = np.zeros(len(calls), dtype=np.int64)
    np.minimum.at(begin, of_call, spans.start_ns[rows])
    np.maximum.at(end, of_call, spans.end_ns[rows])
    return union(begin, end)


@once
def unrecorded_times(spans: Labels, index: int) -> Intervals:
    """The time in which that GPU was busy with unrecorded work: an idle GPU would begin a launch, or end a wait, at
    once.

    Work before the first recorded work was launched before the recording began, and fills the time until then.
    """
    rows = np.flatnonzero(spans.on_device(index))
    call, start, end = spans.call[rows], spans.start_ns[rows], spans.start_ns[rows] + spans.duration_ns[rows]
    begin_ns = spans.window_ns[0]
    free_ns = np.append(begin_ns, np.maximum.accumulate(end)[:-1])[: len(rows)]
    begun = np.maximum(free_ns, spans.start_ns[call] + spans.duration_ns[call])
    first = np.zeros(len(rows), dtype=bool)  # of each call: the rest follows the graph's own order
    first[np.unique(call, return_index=True)[1]] = True
    late = (call >= 0) & first & (start - begun > LATE_NS)
    begun[:1] = begin_ns
    idle = subtract(spans.times(spans.training(*WAITS)), spans.times(spans.of(*WORK)))
    return joined(np.stack((begun, start), axis=1)[late], idle[idle[:, 1] - idle[:, 0] > LATE_NS])


def host_steps(run: Run, timeline: Timeline) -> tuple[list[int], Intervals, list[int]]:
    """Numbers, windows on the host and flags of the steps to account; without any, the whole window as one."""
    if not run.traced_numbers:
        return [0], np.array([timeline.window_ns], dtype=np.int64), [int(StepFlag.PARTIAL)]
    rows = run.traced_rows
    windows = np.stack((run.steps.start_ns[rows], run.steps.end_ns[rows]), axis=1)
    return run.steps.number[rows].tolist(), windows, run.steps.flags[rows].tolist()


def device_windows(timeline: Timeline, host: Intervals, index: int) -> Intervals:
    """The windows of the steps on one GPU, [n, 2] in ns, from those on the host.

    Only the main stream, which computes most, delays a step; a copy for the next step in parallel to the kernels does
    not. Unrecorded work delays a step, too; if the record ends with it, the last window ends there.
    """
    spans, unrecorded = labels(timeline), unrecorded_times(timeline, index)
    launched_ns, reached_ns = _reached(spans, index)

    def on_device(host_ns: Int64) -> Int64:
        before = np.searchsorted(launched_ns, host_ns, side="left")
        later: Int64 = np.maximum(host_ns, np.append(reached_ns, NOTHING_NS)[before - 1])
        inside = np.flatnonzero(covers(unrecorded, later))
        later[inside] = unrecorded[np.searchsorted(unrecorded[:, 0], later[inside], side="right") - 1, 1]
        return later

    windows = np.stack((on_device(host[:, 0]), on_device(host[:, 1])), axis=1)
    if len(unrecorded) and unrecorded[-1, 1] >= spans.window_ns[1] - LATE_NS:
        windows[-1, 1] = np.clip(windows[-1, 1], windows[-1, 0], max(windows[-1, 0], unrecorded[-1, 0]))
    return windows


@once
def _reached(spans: Labels, index: int) -> tuple[Int64, Int64]:
    """When the work of the main stream was launched, in that order, and when it and all earlier work had ended."""
    rows = main_stream(spans, index)
    launched_ns = called_ns(spans, rows)
    order = np.argsort(launched_ns, kind="stable")
    return launched_ns[order], np.maximum.accumulate(spans.end_ns[rows][order])


def main_stream(timeline: Timeline, index: int) -> Rows:
    """The rows of the stream that computes most on that GPU: kernels, copies and memsets.

    Communication kernels wait for other GPUs, so their time is not used, unless nothing else ran.
    """
    spans = labels(timeline)
    for kinds in ((What.KERNEL,), KERNELS, WORK):
        rows = np.flatnonzero(spans.on_device(index, *kinds))
        if len(rows):
            time = np.bincount(spans.lane_id[rows], weights=spans.duration_ns[rows] + 1.0)
            return np.flatnonzero(spans.of(*WORK) & (spans.lane_id == int(time.argmax())))
    return np.empty(0, np.intp)


def called_ns(timeline: Timeline, rows: Rows) -> Int64:
    """When each of these device rows was launched; the row's own begin if the launch is not in the trace.

    Work of a stream before its first work with a launch was launched before the recording began.
    """
    spans = labels(timeline)
    call, start = spans.call[rows], spans.start_ns[rows]
    if (call >= 0).all():
        return spans.start_ns[call]
    launched = np.flatnonzero(spans.call >= 0)
    lanes, first = np.unique(spans.lane_id[launched], return_index=True)  # rows are in order of time
    first_ns = np.full(len(spans.lanes), NOTHING_NS)
    first_ns[lanes] = spans.start_ns[launched[first]]
    before = start < first_ns[spans.lane_id[rows]]
    return np.where(call >= 0, spans.start_ns[call], np.where(before, np.minimum(start, spans.window_ns[0] - 1), start))


def launched_within(timeline: Timeline, rows: Rows, host: Intervals, device: Intervals) -> npt.NDArray[np.bool_]:
    """Which of these device rows the steps launched; of rows without a launch in the trace, which began within the
    steps.

    `host` and `device` are the windows of the steps.
    """
    spans = labels(timeline)
    call = spans.call[rows]
    by_launch, by_begin = covers(host, spans.start_ns[call]), covers(device, spans.start_ns[rows])
    return np.where(call >= 0, by_launch, by_begin).astype(bool)
