"""The measured window as a graph of tasks that can be played again with some of them shorter, longer or gone.

Time on the host moves by a shift: what the host does not wait for keeps its own duration (Python included), and a wait
ends when what it waits for has ended. Every task of the device begins when its stream is free, its launch has reached
the device and, where the trace shows it, another stream has got so far (`replay_tasks`): so the unchanged window plays
as it was measured. After Lumos (MLSys 2025) and Daydream (ATC 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from gpulab.analysis.breakdown import median_window
from gpulab.intervals import Intervals, clip, measure, union
from gpulab.run import Int64, Run, Timeline
from gpulab.timeline.labels import WAITS, Mask, What, Where, distinct, labels
from gpulab.timeline.launches import called_ns, device_windows, host_steps, main_stream

# ns: a wait that ends so soon after a task of the device was a wait for it, and the same of a call that says so. Ours.
TIGHT_NS, NEAR_NS = 20_000, 100_000
# Launches that a GPU's queue holds: on a V100 (v100_ddp_healthy) 1022 were waiting at each launch that was held up.
QUEUE_HOLDS = 1_000
# ns of a synchronizing call that has nothing to wait for, and between two kernels of one stream. Ours.
LEAST_SYNC_NS, LEAST_GAP_NS = 2_000, 500
# Percentile of the latencies of launches onto an idle stream that stands for the least one. Ours.
LATENCY_PERCENTILE = 5

Factors = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

_NO_ROWS: Rows = np.empty(0, np.intp)
# In this order where they happen at once: what follows a wait begins at its end, and what is launched at a boundary
# belongs to the step after it.
_WAIT_ENDS, _STEP_BEGINS, _STEP_ENDS, _LAUNCH, _UNLAUNCHED = range(5)
_NEVER = float("-inf")


class Changes(Struct, frozen=True):
    """What is different when the window is played again.

    `device_factor` scales the duration of each row of the timeline that is a task of the device (0: it takes no time),
    `host` lists stretches of the host's time as [start, end) with the share of it that remains, `free_waits` are rows
    of synchronizing calls that no longer wait.
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
    """One playing: wall time of each profiled step, and the share of it in which the device worked."""

    step_ns: Int64
    busy_fraction: float

    @property
    def step_us(self) -> float:
        """The median step."""
        return float(np.median(self.step_ns)) / 1e3


class Replay:
    """The tasks of one device of a run's window. Raises ValueError where the run has no device's work in its trace.

    Where the window holds more than `most_tasks`, only steps around the median one are played, after one that leads in.
    """

    def __init__(self, run: Run, device_index: int, most_tasks: int | None = None) -> None:
        timeline = run.timeline
        if timeline is None or not timeline.has_device_events:
            raise ValueError("the run holds no trace of a GPU")
        spans = labels(timeline)
        work = np.flatnonzero(spans.on_device(device_index))
        if not len(work):
            raise ValueError(f"the trace holds no work of GPU {device_index}")
        self._timeline = timeline
        self._windows, begin_ns = host_steps(run, timeline)[1], timeline.window_ns[0]
        if most_tasks is not None and len(work) > most_tasks:
            self._windows, begin_ns = _fewer(self._windows, called_ns(timeline, work), most_tasks)
            end_ns = device_windows(timeline, self._windows, device_index)[-1, 1]
            work = work[(timeline.end_ns[work] > begin_ns) & (timeline.start_ns[work] < end_ns)]
        self._tasks = Tasks.of(timeline, work)
        self._on_main = np.isin(self._tasks.row, main_stream(timeline, device_index))
        self._waits = waits_for_device(timeline, self._tasks, begin_ns)
        self._happenings = _Happenings.of(timeline, self._tasks, self._waits, self._windows)

    def play(self, changes: Changes | None = None) -> Played:
        """The window again, with these changes. Shorter tasks never make its end later."""
        changes = changes or Changes()
        playing = _Playing(self._timeline, self._tasks, self._waits, changes, self._on_main)
        happenings = self._happenings
        step_ns = playing.through(happenings, _without(changes.host, happenings.at_ns), len(self._windows))
        return Played(np.rint(step_ns[1] - step_ns[0]).astype(np.int64), playing.busy_fraction(step_ns))


class _Happenings(Struct, frozen=True):
    """What the host does, in order of time: launches, ends of waits, work launched elsewhere, steps' begins and ends.

    `subject` is a row of the timeline (launches, waits), a task (`_UNLAUNCHED`) or a step's number from 0.
    """

    at_ns: Int64
    kind: list[int]
    subject: list[int]
    tasks_of: dict[int, list[int]]  # by launching row

    @classmethod
    def of(cls, timeline: Timeline, tasks: Tasks, waits: dict[int, Wait], windows: Intervals) -> _Happenings:
        tasks_of: dict[int, list[int]] = {}
        lost: list[int] = []
        for place, launch in enumerate(tasks.launch.tolist()):
            if launch >= 0:
                tasks_of.setdefault(launch, []).append(place)
            else:
                lost.append(place)
        calls = np.array(sorted({*tasks_of, *waits}), np.intp)
        waiting, unseen = np.array(list(waits), np.intp), np.array(lost, np.intp)
        steps = np.arange(len(windows))
        groups: tuple[tuple[int, npt.NDArray[np.intp], Int64], ...] = (
            (_LAUNCH, calls, timeline.start_ns[calls]),
            (_WAIT_ENDS, waiting, timeline.end_ns[waiting]),
            (_UNLAUNCHED, unseen, called_ns(timeline, tasks.row)[unseen]),
            (_STEP_BEGINS, steps, windows[:, 0]),
            (_STEP_ENDS, steps, windows[:, 1]),
        )
        at = np.concatenate([times for _, _, times in groups])
        kind = np.concatenate([np.full(len(times), k) for k, _, times in groups])
        subject = np.concatenate([who for _, who, _ in groups])
        order = np.lexsort((kind, at))
        return cls(at[order], kind[order].tolist(), subject[order].tolist(), tasks_of)


class _Playing:
    """One pass over the happenings. Python lists: an element of an array costs ten times as much to read.

    A step ends when all that it launched on the main stream has ended, and not before its end on the host.
    """

    def __init__(
        self,
        timeline: Timeline,
        tasks: Tasks,
        waits: dict[int, Wait],
        changes: Changes,
        on_main: npt.NDArray[np.bool_],
    ) -> None:
        duration = timeline.duration_ns[tasks.row].astype(np.float64)
        if changes.device_factor is not None:
            duration = duration * changes.device_factor[tasks.row]
        self._lengths: list[float] = duration.tolist()
        self._on_main: list[bool] = on_main.tolist()
        self._reached_ns = [_NEVER]  # end of all work so far on the main stream
        self._free = set(changes.free_waits.tolist())
        self._waits = waits
        self._before, self._other = tasks.before.tolist(), tasks.other.tolist()
        self._launch_ns, self._gap_ns, self._other_ns = (
            tasks.launch_ns.tolist(),
            tasks.gap_ns.tolist(),
            tasks.other_ns.tolist(),
        )
        self._starts, self._ends = [_NEVER] * len(duration), [_NEVER] * len(duration)

    def through(self, happenings: _Happenings, host_ns: Factors, step_count: int) -> Factors:
        """Begins and ends of the steps, as float64 [2, steps]. `host_ns`: of each happening, before any shift."""
        shift = 0.0
        opened: dict[int, float] = {}
        bounds = np.zeros((2, step_count))
        begin, launch_ns, launched, waits = self._beginning(), self._launch_ns, happenings.tasks_of, self._waits
        for kind, who, unshifted in zip(happenings.kind, happenings.subject, host_ns.tolist(), strict=True):
            now = unshifted + shift
            if kind == _LAUNCH:
                for place in launched.get(who, ()):
                    begin(place, now + launch_ns[place])
                if who in waits:
                    opened[who] = now
            elif kind == _WAIT_ENDS:
                shift += self._until(who, opened.get(who, now)) - now
            elif kind == _UNLAUNCHED:
                begin(who, now + launch_ns[who])
            else:
                bounds[kind - _STEP_BEGINS, who] = max(now, self._reached_ns[0])
        return bounds

    def _beginning(self) -> Callable[[int, float], None]:
        """Places a task that is ready at that time. Everything it reads is in its closure: a window has many tasks."""
        before, other, on_main = self._before, self._other, self._on_main
        starts, ends, lengths, gap_ns, other_ns = self._starts, self._ends, self._lengths, self._gap_ns, self._other_ns
        reached_ns = self._reached_ns

        def begin(place: int, ready: float) -> None:
            earlier = before[place]
            if earlier >= 0 and (free := ends[earlier] + gap_ns[place]) > ready:
                ready = free
            elsewhere = other[place]
            if elsewhere >= 0 and (free := ends[elsewhere] + other_ns[place]) > ready:
                ready = free
            starts[place] = ready
            ends[place] = end = ready + lengths[place]
            if on_main[place] and end > reached_ns[0]:
                reached_ns[0] = end

        return begin

    def _until(self, row: int, opened: float) -> float:
        """When the waiting call returns."""
        if row in self._free:
            return opened + LEAST_SYNC_NS
        wait = self._waits[row]
        return max(opened + wait.least_ns, self._ends[wait.task] + wait.after_ns)

    def busy_fraction(self, bounds: Factors) -> float:
        """Of the time from the first step's begin to the last one's end."""
        first, last = round(bounds[0, 0]), round(bounds[1, -1])
        start, end = (np.rint(np.array(times)).astype(np.int64) for times in (self._starts, self._ends))
        busy_ns: int = measure(clip(union(start, end), first, last))
        return float(busy_ns / max(1, last - first))


def _without(host: Sequence[tuple[Intervals, float]], at_ns: Int64) -> Factors:
    """These times of the host with what was removed before them taken out."""
    points: list[tuple[int, float]] = []
    for intervals, remains in host:
        points += [(int(t), s * (1 - remains)) for a, b in intervals.tolist() for t, s in ((a, 1.0), (b, -1.0))]
    asked = at_ns.astype(np.float64)
    if not points:
        return asked
    points.sort()
    times = np.array([t for t, _ in points], np.int64)
    slopes = np.minimum(1.0, np.cumsum([s for _, s in points]))  # what two changes remove is gone once
    gone = np.concatenate(([0.0], np.cumsum(slopes[:-1] * np.diff(times))))
    return asked - np.interp(asked, times, gone)


def _fewer(windows: Intervals, launched_ns: Int64, most_tasks: int) -> tuple[Intervals, int]:
    """Steps around the one of median length with so many tasks together (at least it alone); where playing begins."""
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
    spans = labels(timeline)
    begun = timeline.start_ns >= begin_ns
    copying, synchronizing = (begun & spans.of(*kinds) for kinds in ((What.COPY_CALL,), WAITS))
    eventless = begun & spans.of(What.WAIT, What.DEVICE_WAIT)  # for which event a call waits is not in the trace
    ended = _found_done(timeline, tasks, np.flatnonzero(eventless))
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


def _with_own_copy(timeline: Timeline, tasks: Tasks, copying: Mask) -> dict[int, Wait]:
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
    calls = np.array(distinct(tasks.launch[launched]), np.intp)
    start = timeline.start_ns[calls]
    begun = np.searchsorted(np.sort(timeline.start_ns[tasks.launch[launched]]), start, side="left")
    ended = np.searchsorted(np.sort(timeline.end_ns[tasks.row[launched]]), start, side="right")
    full = (begun - ended >= QUEUE_HOLDS) & (timeline.duration_ns[calls] > TIGHT_NS)
    blocked: npt.NDArray[np.intp] = calls[full]
    return blocked
