"""The measured window as a graph of tasks that can be replayed with some tasks shorter, longer or removed.

Host work keeps its duration (Python included) and only shifts in time; a wait ends when its device task has ended. A
task of the device begins when its stream is free, its launch has reached the device and, if the trace shows such a
dependency, a task of another stream has ended (`Tasks`). So the unchanged window is replayed as it was measured. After
Lumos (MLSys 2025) and Daydream (ATC 2020).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from gpulab.analysis.breakdown import median_window
from gpulab.intervals import Intervals, clip, measure, union
from gpulab.run import Int64, Run, Timeline
from gpulab.timeline.labels import WAITS, Mask, What, Where, distinct, labels
from gpulab.timeline.launches import called_ns, device_windows, host_steps, main_stream

# ns: a call that ends so soon after a device task waited for it; the second, for calls that say that they wait. Ours.
TIGHT_NS, NEAR_NS = 20_000, 100_000
# Launches that a GPU's queue holds: on a V100 (v100_ddp_healthy), 1022 were pending at each launch that blocked.
QUEUE_HOLDS = 1_000
# ns of a synchronizing call that need not wait, and between two kernels of one stream. Ours.
LEAST_SYNC_NS, LEAST_GAP_NS = 2_000, 500
# Percentile of the launch latencies on an idle stream that is taken as the least latency. Ours.
LATENCY_PERCENTILE = 5

Factors = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

_NO_ROWS: Rows = np.empty(0, np.intp)
# Events of the host, in this order at equal times: what follows a wait begins at its end, and a launch at a step
# boundary belongs to the later step.
_WAIT_ENDS, _STEP_BEGINS, _STEP_ENDS, _LAUNCH, _WAIT_BEGINS = range(5)
_NEVER = float("-inf")


class Changes(Struct, frozen=True):
    """The changes for a replay of the window.

    `device_factor` scales the duration of each timeline row that is a task of the device (0: it takes no time), `host`
    lists stretches of the host's time as [start, end) with the share that remains, `free_waits` are rows of
    synchronizing calls that no longer wait.
    """

    device_factor: Factors | None = None
    host: tuple[tuple[Intervals, float], ...] = ()
    free_waits: Rows = field(default_factory=lambda: _NO_ROWS)

    def and_also(self, other: Changes) -> Changes:
        """This change and the other; their factors multiply."""
        factors = [f for f in (self.device_factor, other.device_factor) if f is not None]
        return Changes(
            device_factor=np.prod(factors, axis=0) if factors else None,
            host=(*self.host, *other.host),
            free_waits=np.union1d(self.free_waits, other.free_waits),
        )


class Played(Struct, frozen=True):
    """The result of one replay: wall time of each profiled step, and the share of it in which the device worked."""

    step_ns: Int64
    busy_fraction: float

    @property
    def step_us(self) -> float:
        """The median step."""
        return float(np.median(self.step_ns)) / 1e3


class Replay:
    """The tasks of one device in a run's window. Raises ValueError if the trace has no device work.

    If the window holds more than `most_tasks`, only steps around the median step are replayed, after one lead-in step.
    """

    def __init__(self, run: Run, device_index: int, most_tasks: int | None = None) -> None:
        timeline = run.timeline
        if timeline is None or not timeline.has_device_events:
            raise ValueError("the run holds no trace of a GPU")
        work = np.flatnonzero(labels(timeline).on_device(device_index))
        if not len(work):
            raise ValueError(f"the trace holds no work of GPU {device_index}")
        windows, begin_ns = host_steps(run, timeline)[1], timeline.window_ns[0]
        if most_tasks is not None and len(work) > most_tasks:
            windows, begin_ns = _fewer(windows, called_ns(timeline, work), most_tasks)
            end_ns = device_windows(timeline, windows, device_index)[-1, 1]
            work = work[(timeline.end_ns[work] > begin_ns) & (timeline.start_ns[work] < end_ns)]
        self._tasks = tasks = Tasks.of(timeline, work)
        self._length_ns = timeline.duration_ns[tasks.row].astype(np.float64)
        self._on_main = np.isin(tasks.row, main_stream(timeline, device_index))
        self._waits = waits = Waits.of(timeline, tasks, begin_ns)
        events = (  # host events: kind and time; each is numbered within its kind
            (_LAUNCH, called_ns(timeline, tasks.row)),
            (_WAIT_BEGINS, timeline.start_ns[waits.row]),
            (_WAIT_ENDS, timeline.end_ns[waits.row]),
            (_STEP_BEGINS, windows[:, 0]),
            (_STEP_ENDS, windows[:, 1]),
        )
        kind = np.repeat([kind for kind, _ in events], [len(times) for _, times in events])
        number = np.concatenate([np.arange(len(times)) for _, times in events])
        at_ns = np.concatenate([times for _, times in events])
        order = np.lexsort((kind, at_ns))
        self._at_ns, self._kind, self._number = at_ns[order], kind[order].tolist(), number[order].tolist()
        self._step_count = len(windows)

    def play(self, changes: Changes | None = None) -> Played:
        """Replay the window with these changes. Shorter tasks never delay its end.

        A step ends when all its launches on the main stream have ended, and not before its end on the host.
        """
        changes, tasks, waits = changes or Changes(), self._tasks, self._waits
        scaled = (
            self._length_ns if changes.device_factor is None else self._length_ns * changes.device_factor[tasks.row]
        )
        # Python lists, read from closures: reading an element of an array costs ten times as much
        columns = (tasks.before, tasks.other, tasks.launch_ns, tasks.gap_ns, tasks.other_ns, self._on_main, scaled)
        before, other, launch_ns, gap_ns, other_ns, on_main, length_ns = (column.tolist() for column in columns)
        free = np.isin(waits.row, changes.free_waits).tolist()
        task, after_ns, least_ns = (column.tolist() for column in (waits.task, waits.after_ns, waits.least_ns))
        starts, ends = [_NEVER] * len(length_ns), [_NEVER] * len(length_ns)
        wait_begins = [0.0] * len(free)
        bounds = np.zeros((2, self._step_count))  # begins and ends of the steps
        shift, reached = 0.0, _NEVER  # shift of the host; end of all work so far on the main stream
        host_ns = _without(changes.host, self._at_ns).tolist()
        for kind, number, unshifted in zip(self._kind, self._number, host_ns, strict=True):
            now = unshifted + shift
            if kind == _LAUNCH:
                start = now + launch_ns[number]
                if (earlier := before[number]) >= 0:
                    start = max(start, ends[earlier] + gap_ns[number])
                if (elsewhere := other[number]) >= 0:
                    start = max(start, ends[elsewhere] + other_ns[number])
                starts[number], ends[number] = start, start + length_ns[number]
                if on_main[number]:
                    reached = max(reached, ends[number])
            elif kind == _WAIT_BEGINS:
                wait_begins[number] = now
            elif kind == _WAIT_ENDS:
                begun = wait_begins[number]
                until = max(begun + least_ns[number], ends[task[number]] + after_ns[number])
                shift += (begun + LEAST_SYNC_NS if free[number] else until) - now
            else:
                bounds[kind - _STEP_BEGINS, number] = max(now, reached)
        first, last = round(bounds[0, 0]), round(bounds[1, -1])
        busy = union(*(np.rint(np.array(times)).astype(np.int64) for times in (starts, ends)))
        busy_fraction = measure(clip(busy, first, last)) / max(1, last - first)
        return Played(np.rint(bounds[1] - bounds[0]).astype(np.int64), float(busy_fraction))


def _without(host: Sequence[tuple[Intervals, float]], at_ns: Int64) -> Factors:
    """Host times, moved earlier by the time that was removed before them."""
    points: list[tuple[int, float]] = []
    for intervals, remains in host:
        points += [(int(t), s * (1 - remains)) for a, b in intervals.tolist() for t, s in ((a, 1.0), (b, -1.0))]
    before_ns = at_ns.astype(np.float64)
    if not points:
        return before_ns
    points.sort()
    times = np.array([t for t, _ in points], np.int64)
    slopes = np.minimum(1.0, np.cumsum([s for _, s in points]))  # time removed by two changes counts once
    gone = np.concatenate(([0.0], np.cumsum(slopes[:-1] * np.diff(times))))
    return before_ns - np.interp(before_ns, times, gone)


def _fewer(windows: Intervals, launched_ns: Int64, most_tasks: int) -> tuple[Intervals, int]:
    """The steps around the median step with up to `most_tasks` tasks (at least that step), and where replay begins."""
    starts = np.sort(launched_ns)
    edges = np.searchsorted(starts, windows)
    counts = edges[:, 1] - edges[:, 0]
    first = last = median_window(windows)
    while True:
        grown = [(a, b) for a, b in ((first, last + 1), (first - 1, last)) if a >= 0 and b < len(windows)]
        fitting = [(a, b) for a, b in grown if counts[a : b + 1].sum() <= most_tasks]
        if not fitting:
            break
        first, last = fitting[0]
    begin = windows[max(0, first - 1), 0]
    return windows[first : last + 1], int(begin)


def host_spans(timeline: Timeline, names: Sequence[str]) -> Intervals:
    """The training thread's time in spans whose names begin with one of these."""
    spans = labels(timeline)
    mine = spans.where == Where.TRAINER
    return spans.times(mine & spans.named(lambda name: name.startswith(tuple(names))))


NEVER = np.iinfo(np.int64).min // 4


class Tasks(Struct, frozen=True):
    """The device's tasks in the order in which the host launched them, with the constraints on their begin.

    `launch` is the row of the launching call, -1 if it is not in the trace. `before` is the previous task on its
    stream, `other` a task of another stream that it waited for, as indices in this order; -1: none. `launch_ns`,
    `gap_ns` and `other_ns` are the delays after these three.
    """

    row: Rows
    launch: Rows
    before: Rows
    other: Rows
    launch_ns: Int64
    gap_ns: Int64
    other_ns: Int64

    @classmethod
    def of(cls, timeline: Timeline, work: Rows) -> Tasks:
        order = np.lexsort((timeline.start_ns[work], called_ns(timeline, work)))
        row = work[order]
        launch = labels(timeline).call[row].astype(np.intp)
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


def _previous_on_stream(timeline: Timeline, row: Rows) -> Rows:
    """For each task, the index of the previous task on its stream."""
    lane, start = timeline.lane_id[row], timeline.start_ns[row]
    order = np.lexsort((start, lane))
    before = np.full(len(row), -1, np.intp)
    same = lane[order][1:] == lane[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    return before


def _latest_elsewhere(timeline: Timeline, row: Rows) -> tuple[Rows, Int64]:
    """For each task, the earlier-launched task of another stream that ended last before it began, and that end."""
    lane, start, end = timeline.lane_id[row], timeline.start_ns[row], timeline.end_ns[row]
    latest = np.full(len(row), -1, np.intp)
    when = np.full(len(row), NEVER, np.int64)
    streams = distinct(lane)
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


class Waits(Struct, frozen=True):
    """Calls of the host that wait for the device, by row: such a call ends no sooner than `after_ns` after a device
    task (`task`: its index), nor sooner than `least_ns` after its own begin.

    A copy that ends with its call is waited for by that call. A synchronizing call waits for the task that ended last
    before it, a launch into a full queue for the task that made room. A synchronizing call that found the device idle
    has its own length, but would wait if the device were later or the host earlier.
    """

    row: Int64
    task: Int64
    after_ns: Int64
    least_ns: Int64

    @classmethod
    def of(cls, timeline: Timeline, tasks: Tasks, begin_ns: int) -> Waits:
        """The waits of calls from `begin_ns` on."""
        spans = labels(timeline)
        begun = timeline.start_ns >= begin_ns
        copying, synchronizing = (begun & spans.of(*kinds) for kinds in ((What.COPY_CALL,), WAITS))
        eventless = begun & spans.of(What.WAIT, What.DEVICE_WAIT)  # the event of a wait is not in the trace
        ways = (  # the last explanation of a call counts
            _on_idle_device(timeline, tasks, np.flatnonzero(eventless)),
            _ended_before(timeline, tasks, np.flatnonzero(synchronizing | copying), NEAR_NS),
            _ended_before(timeline, tasks, _into_a_full_queue(timeline, tasks), TIGHT_NS),
            _with_own_copy(timeline, tasks, copying),
        )
        latest_first = np.concatenate(ways, axis=1)[:, ::-1]
        _, first = np.unique(latest_first[0], return_index=True)
        return cls(*latest_first[:, first])


def _last_ended(timeline: Timeline, tasks: Tasks, rows: Rows) -> tuple[Rows, Rows, Int64]:
    """The rows before whose end a task had ended, the last such task of each, and its end."""
    task_end = timeline.end_ns[tasks.row]
    by_end = np.argsort(task_end, kind="stable")
    at = np.searchsorted(task_end[by_end], timeline.end_ns[rows], side="right") - 1
    task = by_end[at[at >= 0]]
    return rows[at >= 0], task, task_end[task]


def _on_idle_device(timeline: Timeline, tasks: Tasks, rows: Rows) -> Int64:
    """The calls that began when all tasks had ended: columns of `Waits`, as in the functions below."""
    rows, task, task_end = _last_ended(timeline, tasks, rows)
    waits = np.stack((rows, task, np.zeros_like(rows), timeline.duration_ns[rows]))
    return waits[:, timeline.start_ns[rows] > task_end]


def _ended_before(timeline: Timeline, tasks: Tasks, rows: Rows, most_ns: int) -> Int64:
    """The calls among `rows` that ended within `most_ns` after a device task, with that task."""
    rows, task, task_end = _last_ended(timeline, tasks, rows)
    after = timeline.end_ns[rows] - task_end
    waits = np.stack((rows, task, after, np.full(len(rows), LEAST_SYNC_NS)))
    return waits[:, (after <= most_ns) & (timeline.start_ns[rows] <= task_end)]


def _with_own_copy(timeline: Timeline, tasks: Tasks, copying: Mask) -> Int64:
    """Copies of pageable memory, whose call returns when the copy has ended, or a little earlier."""
    own = np.flatnonzero((tasks.launch >= 0) & copying[tasks.launch])
    rows = tasks.launch[own]
    after = timeline.end_ns[rows] - timeline.end_ns[tasks.row[own]]
    waits = np.stack((rows, own, after, np.full(len(rows), LEAST_SYNC_NS)))
    return waits[:, (np.abs(after) <= NEAR_NS) & ((after >= 0) | (timeline.duration_ns[rows] > TIGHT_NS))]


def _into_a_full_queue(timeline: Timeline, tasks: Tasks) -> Rows:
    """Launching calls that took long while the queue was full."""
    launched = tasks.launch >= 0
    calls = np.array(distinct(tasks.launch[launched]), np.intp)
    start = timeline.start_ns[calls]
    begun = np.searchsorted(np.sort(timeline.start_ns[tasks.launch[launched]]), start, side="left")
    ended = np.searchsorted(np.sort(timeline.end_ns[tasks.row[launched]]), start, side="right")
    full = (begun - ended >= QUEUE_HOLDS) & (timeline.duration_ns[calls] > TIGHT_NS)
    blocked: Rows = calls[full]
    return blocked
