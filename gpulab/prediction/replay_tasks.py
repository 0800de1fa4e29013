"""What the device did in a window, task by task, and what held each of them back: the constraints of a replay.

How long a launch takes to reach the device, or a stream to go on, is read off the constraint that was tight in the
measured window; the others get the least delay that the window shows anywhere.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gpulab.prediction.calibration import (
    LATENCY_PERCENTILE,
    LEAST_GAP_NS,
    LEAST_SYNC_NS,
    NEAR_NS,
    QUEUE_HOLDS,
    TIGHT_NS,
)
from gpulab.run import Category, Int64, Timeline
from gpulab.timeline import spans
from gpulab.timeline.device_steps import called_ns

NEVER = np.iinfo(np.int64).min // 4


class Tasks(Struct, frozen=True):
    """The device's tasks in the order in which the host launched them, with the constraint that held each back.

    `launch` is the row of the launching call, -1 where it is not in the trace. `before` is the task before it on its
    stream, `other` one of another stream that it waited for, by place in this order; -1: none. `launch_ns`, `gap_ns`
    and `other_ns` are the delays after these.
    """

    row: npt.NDArray[np.intp]
    launch: npt.NDArray[np.intp]
    before: npt.NDArray[np.intp]
    other: npt.NDArray[np.intp]
    launch_ns: Int64
    gap_ns: Int64
    other_ns: Int64

    @classmethod
    def of(cls, timeline: Timeline, work: npt.NDArray[np.intp]) -> Tasks:
        calls = np.flatnonzero(spans.in_category(timeline, Category.CUDA_RUNTIME, Category.CUDA_DRIVER))
        started, launching = spans.matched(timeline, work, calls)
        launch_of = np.full(len(timeline), -1, np.intp)
        launch_of[started] = launching
        order = np.lexsort((timeline.start_ns[work], called_ns(timeline, work)))
        row = work[order]
        launch = launch_of[row]
        before = _previous_on_stream(timeline, row)
        start, end = timeline.start_ns[row], timeline.end_ns[row]
        before_end = np.where(before >= 0, end[before], NEVER)
        called = called_ns(timeline, row)
        latency = start - called
        idle = (launch >= 0) & (before_end < called)
        least = int(np.percentile(latency[idle], LATENCY_PERCENTILE)) if idle.any() else 0
        least = max(0, least)
        by_stream = before_end + LEAST_GAP_NS
        by_launch = np.where(launch >= 0, called + least, NEVER)
        other, other_end = _latest_elsewhere(timeline, row)
        loose = start - np.maximum(by_stream, by_launch) > TIGHT_NS // 4
        waited = loose & (other >= 0) & (start - other_end <= TIGHT_NS)
        stream_tight = ~waited & (by_stream >= by_launch)
        launch_tight = ~waited & ~stream_tight
        return cls(
            row=row,
            launch=launch,
            before=before,
            other=np.where(waited, other, -1),
            launch_ns=np.where(launch_tight | (before < 0), latency, np.minimum(least, latency)),
            gap_ns=np.where(stream_tight, start - before_end, np.minimum(LEAST_GAP_NS, start - before_end)),
            other_ns=np.where(waited, start - other_end, 0),
        )


def _previous_on_stream(timeline: Timeline, row: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """The place of the task that ran before each on its stream."""
    lane, start = timeline.lane_id[row], timeline.start_ns[row]
    order = np.lexsort((start, lane))
    before = np.full(len(row), -1, np.intp)
    same = lane[order][1:] == lane[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    return before


def _latest_elsewhere(timeline: Timeline, row: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.intp], Int64]:
    """The task of another stream that ended last before each began, and when; only tasks launched before it."""
    lane, start, end = timeline.lane_id[row], timeline.start_ns[row], timeline.end_ns[row]
    latest = np.full(len(row), -1, np.intp)
    when = np.full(len(row), NEVER, np.int64)
    streams = np.unique(lane)
    for stream in streams if len(streams) > 1 else ():
        theirs = np.flatnonzero(lane == stream)
        theirs = theirs[np.argsort(end[theirs], kind="stable")]
        mine = np.flatnonzero(lane != stream)
        at = np.searchsorted(end[theirs], start[mine], side="right") - 1
        earlier = at >= 0
        candidate = theirs[at[earlier]]
        mine = mine[earlier]
        better = (end[candidate] > when[mine]) & (candidate < mine)
        latest[mine[better]] = candidate[better]
        when[mine[better]] = end[candidate[better]]
    return latest, when


class Wait(Struct, frozen=True):
    """A call of the host that ends no sooner than `after_ns` behind a task of the device (its place), nor sooner than
    `least_ns` after its own begin."""

    task: int
    after_ns: int
    least_ns: int


def waits_for_device(timeline: Timeline, tasks: Tasks, begin_ns: int) -> dict[int, Wait]:
    """Host calls from `begin_ns` on that wait for the device, by row.

    A copy waits for itself where it ends with its call, a synchronizing call for the task that ended last before it,
    a launch into a full queue for the one that made room. A synchronizing call that found the device done has its own
    length, but would wait as well if the device were later or the host sooner.
    """
    if not len(tasks.row):
        return {}
    host = spans.in_category(timeline, Category.CUDA_RUNTIME, Category.CUDA_DRIVER) & (timeline.start_ns >= begin_ns)
    copying = host & spans.named(timeline, spans.starting_with(*spans.COPYING))
    synchronizing = host & spans.named(timeline, spans.starting_with(*spans.SYNCHRONIZING))
    events = spans.named(timeline, spans.containing("EventSynchronize"))  # which event is not in the trace
    ended = _found_done(timeline, tasks, np.flatnonzero(synchronizing & ~events))
    ended |= _ended_before(timeline, tasks, np.flatnonzero(synchronizing | copying), NEAR_NS)
    ended |= _ended_before(timeline, tasks, _into_a_full_queue(timeline, tasks), TIGHT_NS)
    return ended | _with_own_copy(timeline, tasks, copying)


def _last_ended(
    timeline: Timeline, tasks: Tasks, rows: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Those rows before whose end a task had ended, and the last such task of each."""
    task_end = timeline.end_ns[tasks.row]
    by_end = np.argsort(task_end, kind="stable")
    at = np.searchsorted(task_end[by_end], timeline.end_ns[rows], side="right") - 1
    return rows[at >= 0], by_end[at[at >= 0]]


def _found_done(timeline: Timeline, tasks: Tasks, rows: npt.NDArray[np.intp]) -> dict[int, Wait]:
    rows, task = _last_ended(timeline, tasks, rows)
    done = timeline.start_ns[rows] > timeline.end_ns[tasks.row][task]
    rows, task = rows[done], task[done]
    return _waits(rows, task, np.zeros(len(rows), np.int64), timeline.duration_ns[rows])


def _ended_before(timeline: Timeline, tasks: Tasks, rows: npt.NDArray[np.intp], most_ns: int) -> dict[int, Wait]:
    """For the calls among `rows` that ended within `most_ns` after a task of the device: that task."""
    rows, task = _last_ended(timeline, tasks, rows)
    task_end = timeline.end_ns[tasks.row][task]
    after = timeline.end_ns[rows] - task_end
    tight = (after <= most_ns) & (timeline.start_ns[rows] <= task_end)
    return _waits(rows[tight], task[tight], after[tight], np.full(int(tight.sum()), LEAST_SYNC_NS))


def _with_own_copy(timeline: Timeline, tasks: Tasks, copying: spans.Mask) -> dict[int, Wait]:
    """Copies of pageable memory: the call returns when the copy has ended, or a little before."""
    own = np.flatnonzero((tasks.launch >= 0) & copying[tasks.launch])
    rows = tasks.launch[own]
    after = timeline.end_ns[rows] - timeline.end_ns[tasks.row[own]]
    waited = (np.abs(after) <= NEAR_NS) & ((after >= 0) | (timeline.duration_ns[rows] > TIGHT_NS))
    return _waits(rows[waited], own[waited], after[waited], np.full(int(waited.sum()), LEAST_SYNC_NS))


def _waits(rows: npt.NDArray[np.intp], task: npt.NDArray[np.intp], after: Int64, least: Int64) -> dict[int, Wait]:
    columns = (rows.tolist(), task.tolist(), after.tolist(), least.tolist())
    return {row: Wait(*figures) for row, *figures in zip(*columns, strict=True)}


def _into_a_full_queue(timeline: Timeline, tasks: Tasks) -> npt.NDArray[np.intp]:
    """Launching calls that took long while as many tasks were waiting as a queue holds."""
    launched = tasks.launch >= 0
    calls = np.unique(tasks.launch[launched])
    start = timeline.start_ns[calls]
    begun = np.searchsorted(np.sort(timeline.start_ns[tasks.launch[launched]]), start, side="left")
    ended = np.searchsorted(np.sort(timeline.end_ns[tasks.row[launched]]), start, side="right")
    full = (begun - ended >= QUEUE_HOLDS) & (timeline.duration_ns[calls] > TIGHT_NS)
    blocked: npt.NDArray[np.intp] = calls[full]
    return blocked
