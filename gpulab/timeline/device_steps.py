"""When the device works for which step: the host may run far ahead of it, so a step has two windows.

On the host a step lasts from one boundary of the training loop to the next. On the device it begins as soon as all work
that was launched before it has ended, and not before its begin on the host. Where the host waits for the device in each
step both windows are the same; where nothing makes it wait, about a thousand launches lie between them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpulab.intervals import Intervals, covers
from gpulab.run import Category, Int64, Run, StepFlag, Timeline
from gpulab.timeline import spans
from gpulab.timeline.launches import LATE_NS, launch_of, unrecorded_times

NOTHING_NS = np.iinfo(np.int64).min


def host_steps(run: Run, timeline: Timeline) -> tuple[list[int], Intervals, list[int]]:
    """Numbers, windows on the host and flags of the steps to account; without any, the whole window as one."""
    if not run.traced_numbers:
        return [0], np.array([timeline.window_ns], dtype=np.int64), [int(StepFlag.PARTIAL)]
    rows = run.traced_rows
    windows = np.stack((run.steps.start_ns[rows], run.steps.end_ns[rows]), axis=1)
    return run.steps.number[rows].tolist(), windows, run.steps.flags[rows].tolist()


def device_windows(timeline: Timeline, host: Intervals, index: int) -> Intervals:
    """The windows of the steps on one GPU, [n, 2] in ns, from those on the host.

    Only the main stream holds a step back, the one that computes most: a copy for the next step that runs beside
    the kernels does not. Work that is not recorded does; where the record ends with it, so does the last window.
    """
    rows, unrecorded = main_stream(timeline, index), unrecorded_times(timeline, index)
    launched_ns = called_ns(timeline, rows)
    order = np.argsort(launched_ns, kind="stable")
    launched_ns = launched_ns[order]
    reached_ns = np.maximum.accumulate(timeline.end_ns[rows][order])

    def on_device(host_ns: Int64) -> Int64:
        before = np.searchsorted(launched_ns, host_ns, side="left")
        ended_ns = np.concatenate((np.array([NOTHING_NS]), reached_ns))[before]
        later: Int64 = np.maximum(host_ns, ended_ns)
        inside = np.flatnonzero(covers(unrecorded, later))
        later[inside] = unrecorded[np.searchsorted(unrecorded[:, 0], later[inside], side="right") - 1, 1]
        return later

    windows = np.stack((on_device(host[:, 0]), on_device(host[:, 1])), axis=1)
    if len(unrecorded) and unrecorded[-1, 1] >= timeline.window_ns[1] - LATE_NS:
        windows[-1, 1] = np.clip(windows[-1, 1], windows[-1, 0], max(windows[-1, 0], unrecorded[-1, 0]))
    return windows


def main_stream(timeline: Timeline, index: int) -> Int64:
    """Rows of the stream that computes most on that GPU: its kernels, copies and memsets.

    Kernels of communication wait for other GPUs, so their time says nothing; they count where nothing else ran.
    """
    work = spans.device_items(timeline, index)
    kernels = work & spans.in_category(timeline, Category.KERNEL)
    computing = kernels & ~spans.named(timeline, spans.is_communication)
    judged = next((mask for mask in (computing, kernels) if mask.any()), work)
    if not judged.any():
        return np.empty(0, np.int64)
    time = np.bincount(timeline.lane_id[judged], weights=timeline.duration_ns[judged] + 1.0)
    return np.flatnonzero(work & (timeline.lane_id == int(time.argmax())))


def called_ns(timeline: Timeline, rows: Int64) -> Int64:
    """When each of these rows of a device was launched; its own begin where the launch is not in the trace.

    What a stream did before its first work with a launch was launched before the recording began.
    """
    call, start = launch_of(timeline, rows), timeline.start_ns[rows]
    if (call >= 0).all():
        return timeline.start_ns[call]
    first_ns = _first_launched_ns(timeline)[timeline.lane_id[rows]]
    unlaunched_ns = np.where(start < first_ns, np.minimum(start, timeline.window_ns[0] - 1), start)
    return np.where(call >= 0, timeline.start_ns[call], unlaunched_ns)


def _first_launched_ns(timeline: Timeline) -> Int64:
    """By lane: when the first work with a launch in the trace began; `NOTHING_NS` where there is none."""
    work = np.flatnonzero(spans.device_items(timeline))
    launched = work[launch_of(timeline, work) >= 0]
    lanes, first = np.unique(timeline.lane_id[launched], return_index=True)  # rows are in order of time
    first_ns = np.full(len(timeline.lanes), NOTHING_NS)
    first_ns[lanes] = timeline.start_ns[launched[first]]
    return first_ns


def launched_within(timeline: Timeline, rows: Int64, host: Intervals, device: Intervals) -> npt.NDArray[np.bool_]:
    """Which of these rows of a device the steps launched; of those without a launch in the trace: which began in them.

    `host` and `device` are the windows of the steps.
    """
    call = launch_of(timeline, rows)
    by_launch, by_begin = covers(host, timeline.start_ns[call]), covers(device, timeline.start_ns[rows])
    return np.where(call >= 0, by_launch, by_begin).astype(bool)
