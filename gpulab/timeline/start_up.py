"""What happens once, at the first calls: libraries are loaded, the GPU's context is created, workers are started.

No step is like it. A call counts where it takes far longer than any such call does later; of an operator only the time
in which nothing that it calls is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from gpulab.intervals import EMPTY, Intervals, intersect, subtract, union
from gpulab.run import Category, Int64, Timeline
from gpulab.timeline import spans

# Ours. In seven real traces that began after the start-up only waits and copies take more than 20 ms.
LEAST_NS = 100_000_000
LONGER = 20.0  # times the later calls of the same operator
WORKERS_LONGER = 2.0  # times any later fetch
_COPIES = ("aten::copy_", "aten::to", "aten::_to_copy", "aten::item", "aten::_local_scalar_dense")
_FIRST_STEP = "ProfilerStep#0"


class StartUp(Struct, frozen=True):
    """`times` as a set; `calls` names what took them with how long (ns), the longest first."""

    times: Intervals
    calls: tuple[tuple[str, int], ...]


def start_up(timeline: Timeline, index: int | None) -> StartUp:
    """On that GPU, while it does nothing; on a CPU (None) only the start of the DataLoader's workers."""
    idle = _idle(timeline, index)
    named = list(_first_fetch(timeline))
    if index is not None:
        named += [*_runtime_calls(timeline), *_operators(timeline), *_loading(timeline)]
    within = [(name, intersect(times, idle)) for name, times in named]
    every = np.concatenate([EMPTY, *(times for _, times in within)])
    lengths: dict[str, int] = {}
    for name, times in within:
        lengths[name] = lengths.get(name, 0) + int((times[:, 1] - times[:, 0]).sum())
    if sum(lengths.values()) < LEAST_NS:
        return StartUp(EMPTY, ())
    calls = sorted(((name, ns) for name, ns in lengths.items() if ns), key=lambda call: -call[1])
    return StartUp(union(every[:, 0], every[:, 1]), tuple(calls))


def worker_start(timeline: Timeline) -> Intervals:
    """The first fetch of a loop whose first step was recorded, from workers that begin only then."""
    return next((times for _, times in _first_fetch(timeline)), EMPTY)


def _idle(timeline: Timeline, index: int | None) -> Intervals:
    whole = np.array([timeline.window_ns], dtype=np.int64)
    return whole if index is None else subtract(whole, spans.covered(timeline, spans.device_items(timeline, index)))


def _of(timeline: Timeline, row: int) -> Intervals:
    start = timeline.start_ns[row : row + 1]
    return union(start, timeline.end_ns[row : row + 1])


def _first_fetch(timeline: Timeline) -> Iterator[tuple[str, Intervals]]:
    mine = spans.on_training_thread(timeline)
    fetches = np.flatnonzero(mine & spans.named(timeline, _is_of_workers))
    steps = np.flatnonzero(mine & spans.named(timeline, spans.starting_with(_FIRST_STEP)))
    first = [row for row in steps.tolist() if timeline.names[timeline.name_id[row]] == _FIRST_STEP]
    if len(fetches) < 2 or not first or timeline.start_ns[fetches[0]] >= timeline.end_ns[first[0]]:
        return
    took = timeline.duration_ns[fetches]
    if took[0] >= LEAST_NS and took[0] > WORKERS_LONGER * took[1:].max():
        yield "starting the DataLoader's workers", _of(timeline, int(fetches[0]))


def _is_of_workers(name: str) -> bool:
    return spans.is_loader(name) and "_MultiProcessing" in name


def _runtime_calls(timeline: Timeline) -> Iterator[tuple[str, Intervals]]:
    """Long calls of the runtime, of names whose calls are no longer so long in the later half of the device's work."""
    calls = spans.on_training_threads(timeline) & spans.runtime_calls(timeline)
    waits = spans.named(timeline, spans.starting_with(*spans.SYNCHRONIZING, *spans.COPYING))
    rows = np.flatnonzero(calls & ~waits & (timeline.duration_ns >= LEAST_NS))
    work = timeline.start_ns[spans.device_items(timeline)]
    half_ns = int(np.median(work)) if len(work) else 0
    late = set(timeline.name_id[rows[timeline.start_ns[rows] > half_ns]].tolist())
    for row in rows.tolist():
        if int(timeline.name_id[row]) not in late:
            yield timeline.names[timeline.name_id[row]], _of(timeline, row)


def _operators(timeline: Timeline) -> Iterator[tuple[str, Intervals]]:
    """First calls of operators that start work on the GPU: where nothing inside them is recorded for long."""
    trainer = spans.on_training_threads(timeline)
    operators = trainer & spans.in_category(timeline, Category.CPU_OP) & spans.named(timeline, _is_loading_operator)
    launches = np.flatnonzero(trainer & spans.launches(timeline))
    for row in np.flatnonzero(operators & (timeline.duration_ns >= LEAST_NS)).tolist():
        start, end = int(timeline.start_ns[row]), int(timeline.end_ns[row])
        begun = timeline.start_ns[launches]
        if not ((begun >= start) & (begun < end)).any() or not _is_first(timeline, operators, row):
            continue
        bare = subtract(_of(timeline, row), _inside(timeline, row))
        yield timeline.names[timeline.name_id[row]], bare[bare[:, 1] - bare[:, 0] >= LEAST_NS]


def _is_loading_operator(name: str) -> bool:
    return name.startswith("aten::") and name not in _COPIES


def _is_first(timeline: Timeline, operators: spans.Mask, row: int) -> bool:
    same = np.flatnonzero(operators & (timeline.name_id == timeline.name_id[row]))
    later = same[same > row]
    if not len(later):
        return bool(same[0] == row)
    usual_ns = float(np.median(timeline.duration_ns[later]))
    return bool(same[0] == row) and float(timeline.duration_ns[row]) >= LONGER * usual_ns


def _inside(timeline: Timeline, row: int) -> Intervals:
    """What the operator itself calls, as far as that is recorded."""
    host = spans.in_category(timeline, *spans.HOST_CATEGORIES) & (timeline.lane_id == timeline.lane_id[row])
    begun = (timeline.start_ns >= timeline.start_ns[row]) & (timeline.start_ns < timeline.end_ns[row])
    rows: Int64 = np.flatnonzero(host & begun)
    rows = rows[rows > row]
    return union(timeline.start_ns[rows], timeline.end_ns[rows])


def _loading(timeline: Timeline) -> Iterator[tuple[str, Intervals]]:
    """What the profiler itself names: modules loaded at their first use, and code compiled for this GPU."""
    rows = spans.in_category(timeline, Category.OVERHEAD) & spans.named(timeline, _is_loading)
    for row in np.flatnonzero(rows & (timeline.duration_ns > 0)).tolist():
        yield timeline.names[timeline.name_id[row]], _of(timeline, row)


def _is_loading(name: str) -> bool:
    return name.lower().startswith(("lazy function loading", "driver compiler"))
