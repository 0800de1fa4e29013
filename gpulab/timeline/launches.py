"""Which call of the host started which item on the device, within which operator, and for which step.

The host may run far ahead of the device, so a step has two windows. On the host it lasts from one boundary of the
training loop to the next. On the device it begins as soon as all work that was launched before it has ended, and not
before its begin on the host. Where the host waits for the device in each step both windows are the same; where nothing
makes it wait, about a thousand launches lie between them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gpulab.intervals import EMPTY, Intervals, covers, joined, subtract, union
from gpulab.run import Category, Int64, Run, StepFlag, Timeline
from gpulab.timeline import spans

LATE_NS = 1_000_000  # ours: a launch reaches an idle GPU within 5 to 50 µs, and a wait ends as soon after its last work


def launch_of(timeline: Timeline, rows: Int64, categories: tuple[Category, ...] = spans.LAUNCHING) -> Int64:
    """For each of the rows (items of the device) the row of the call with the same correlation; -1 where there is none.

    Of several calls with one correlation the earliest counts.
    """
    calls = np.flatnonzero(spans.in_category(timeline, *categories))
    launched, call = spans.matched(timeline, rows, calls)
    call_of_row = np.full(len(timeline), -1, dtype=np.int64)
    call_of_row[launched] = call
    calls_of_rows: Int64 = call_of_row[rows]
    return calls_of_rows


def replay_of(timeline: Timeline, rows: Int64) -> Int64:
    """For each of the rows (items of the device) the row of the call that replayed it in a graph; -1 for all others.

    Where the calls share no correlation with any item (as HIP may write it), the items without a launch that begin
    after such a call are its own.
    """
    graph = spans.runtime_calls(timeline) & spans.named(timeline, spans.is_graph_launch)
    calls = np.flatnonzero(graph)
    none = np.full(len(rows), -1, dtype=np.int64)
    if not len(calls) or not len(rows):
        return none
    launch = launch_of(timeline, rows)
    by_correlation = np.where((launch >= 0) & graph[launch], launch, -1)
    if (by_correlation >= 0).any():
        return by_correlation
    before = np.searchsorted(timeline.start_ns[calls], timeline.start_ns[rows], side="right") - 1
    return np.where((launch < 0) & (before >= 0), calls[np.maximum(before, 0)], none)


def replay_times(timeline: Timeline, index: int) -> Intervals:
    """From the begin of the first to the end of the last item of each replay on that device, merged."""
    rows = np.flatnonzero(spans.device_items(timeline, index))
    replay = replay_of(timeline, rows)
    rows, replay = rows[replay >= 0], replay[replay >= 0]
    if not len(rows):
        return EMPTY
    calls, of_call = np.unique(replay, return_inverse=True)
    begin = np.full(len(calls), np.iinfo(np.int64).max)
    end = np.zeros(len(calls), dtype=np.int64)
    np.minimum.at(begin, of_call, timeline.start_ns[rows])
    np.maximum.at(end, of_call, timeline.end_ns[rows])
    return union(begin, end)


def unrecorded_times(timeline: Timeline, index: int) -> Intervals:
    """When that GPU was busy with what is not recorded: what was launched, or waited for, an idle one begins at once.

    What it did before the first work of the record was launched before the recording began, and lasted from then on.
    """
    rows = np.flatnonzero(spans.device_items(timeline, index))
    call = launch_of(timeline, rows)
    start, begin_ns = timeline.start_ns[rows], timeline.window_ns[0]
    free_ns = np.append(begin_ns, np.maximum.accumulate(timeline.end_ns[rows])[:-1])[: len(rows)]
    begun = np.maximum(free_ns, timeline.end_ns[call])
    first = np.unique(call, return_index=True)[
        1
    ]  # of each call: what follows in a graph waits for the graph's own order
    late = (call >= 0) & np.isin(np.arange(len(rows)), first) & (start - begun > LATE_NS)
    begun[:1] = begin_ns
    waits = spans.runtime_calls(timeline) & spans.on_training_threads(timeline) & spans.named(timeline, spans.is_wait)
    idle = subtract(spans.covered(timeline, waits), spans.covered(timeline, spans.device_items(timeline)))
    return joined(np.stack((begun, start), axis=1)[late], idle[idle[:, 1] - idle[:, 0] > LATE_NS])


class CallTree(Struct, frozen=True):
    """The spans of some host rows of one timeline as trees, thread by thread.

    `parent[i]` is the position in `rows` of the innermost row that was still open on that thread when `rows[i]`
    began; -1 where none was. Rows without length are left out.
    """

    rows: Int64
    parent: Int64

    @classmethod
    def of(cls, timeline: Timeline, rows: Int64) -> CallTree:
        """The tree of these rows, which are in the timeline's order. Who asks again for the same rows gets the same."""
        trees: list[tuple[Int64, CallTree]] = spans.kept_of(timeline).setdefault(cls, [])
        for asked, tree in trees:
            if np.array_equal(asked, rows):
                return tree
        trees.append((rows, cls._of(timeline, rows)))
        return trees[-1][1]

    @classmethod
    def _of(cls, timeline: Timeline, rows: Int64) -> CallTree:
        rows = rows[timeline.duration_ns[rows] > 0]
        by_lane = np.argsort(timeline.lane_id[rows], kind="stable")
        rows = rows[by_lane]
        parent = np.full(len(rows), -1, dtype=np.int64)
        for first, last in _blocks(timeline.lane_id[rows]):
            block = rows[first:last]
            held = open_at_start(timeline.start_ns[block], timeline.end_ns[block])
            parent[first:last] = np.where(held >= 0, held + first, -1)
        return cls(rows, parent)

    def innermost(self, timeline: Timeline, points: Int64) -> Int64:
        """For each of the points (rows of the host) the row of the innermost span of the tree that was open at its
        start, on its own thread; -1 where none was."""
        innermost = np.full(len(points), -1, dtype=np.int64)
        if len(self.rows) == 0 or len(points) == 0:
            return innermost
        for first, last in _blocks(timeline.lane_id[self.rows]):
            mine = np.flatnonzero(timeline.lane_id[points] == timeline.lane_id[self.rows[first]])
            block = self.rows[first:last]
            at = timeline.start_ns[points[mine]]
            position = first + np.searchsorted(timeline.start_ns[block], at, side="right") - 1
            position[position < first] = -1
            climbing = np.flatnonzero(position >= 0)
            while len(climbing):
                closed = timeline.end_ns[self.rows[position[climbing]]] <= at[climbing]
                climbing = climbing[closed]
                position[climbing] = self.parent[position[climbing]]
                climbing = climbing[position[climbing] >= 0]
            innermost[mine] = np.where(position >= 0, self.rows[position], -1)
        return innermost

    def self_ns(self, timeline: Timeline) -> Int64:
        """Each row's own duration without the rows directly in it, in the order of `rows`."""
        own: Int64 = timeline.duration_ns[self.rows].copy()
        inside = np.flatnonzero(self.parent >= 0)
        child, above = self.rows[inside], self.rows[self.parent[inside]]
        shared = np.minimum(timeline.end_ns[child], timeline.end_ns[above]) - timeline.start_ns[child]
        np.subtract.at(own, self.parent[inside], shared)
        return np.maximum(own, 0)


def open_at_start(start: Int64, end: Int64) -> Int64:
    """For each span of one lane the latest earlier row that had not ended when it began; -1 where none was.

    Rows are sorted by start, longer first. The earlier span need not hold the whole of the
    later one: time stamps rounded by the profiler let children outlive their parents. The search climbs a tree of
    maxima, so that no row is asked on its own: O(n log n), without a Python loop over rows.
    """
    latest = np.full(len(start), -1, dtype=np.int64)
    levels = _maxima(end)
    row, node = np.arange(len(start)), np.arange(len(start))
    met: list[tuple[Int64, Int64]] = []
    for level in levels:
        sibling = node - 1
        hit = ((node & 1) == 1) & (level[sibling] > start[row])
        met.append((row[hit], sibling[hit]))
        row, node = row[~hit], node[~hit] >> 1
    row, node = np.empty(0, np.int64), np.empty(0, np.int64)
    for height in range(len(levels) - 1, -1, -1):
        row, node = np.concatenate((row, met[height][0])), np.concatenate((node, met[height][1]))
        if height:
            below = levels[height - 1]
            later = np.minimum(2 * node + 1, len(below) - 1)
            node = np.where(below[later] > start[row], later, 2 * node)
    latest[row] = node
    return latest


def _maxima(values: Int64) -> list[Int64]:
    """The values, the larger of each two, of each four … up to the largest of all."""
    levels = [values]
    while len(levels[-1]) > 1:
        last = levels[-1]
        even = last if len(last) % 2 == 0 else np.append(last, np.iinfo(np.int64).min)
        levels.append(even.reshape(-1, 2).max(axis=1))
    return levels


def _blocks(lane_id: np.ndarray) -> list[tuple[int, int]]:
    """[first, last) of each run of equal lanes."""
    edges = np.flatnonzero(np.diff(lane_id, prepend=-1, append=-1))
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


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
