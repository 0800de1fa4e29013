"""What happens once, at the first calls: libraries are loaded, the GPU's context is created, workers are started.

No step is like it. A call counts where it takes far longer than such calls do later.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from gpulab.intervals import EMPTY, Intervals, intersect, joined, subtract, union
from gpulab.run import Category, Timeline
from gpulab.timeline import spans
from gpulab.timeline.launches import unrecorded_times

# Ours. In seven real traces that began after the start-up only waits and copies take more than 20 ms.
LEAST_NS = 100_000_000  # of a fetch, of a call that no later one shows the usual length of, and of all together,
LEAST_FRACTION = 0.15  # or of the window: what is less hides no other cause
FIRST_NS = 1_000_000  # of a first call
LONGER = 20.0  # times the later calls of the same name, and
THAN_ANY = 2.0  # times any of them, as a fetch
_COPIES = ("aten::copy_", "aten::to", "aten::_to_copy", "aten::item", "aten::_local_scalar_dense")
_FIRST_STEP = "ProfilerStep#0"
WORKERS = "waiting for the DataLoader's workers"


class StartUp(Struct, frozen=True):
    """`times` as a set; `calls` names what took them with how long (ns), the longest first."""

    times: Intervals
    calls: tuple[tuple[str, int], ...]


def start_up(timeline: Timeline, index: int | None) -> StartUp:
    """On that GPU, while it does nothing; on a CPU (None) only the start of the DataLoader's workers."""
    idle = _idle(timeline, index)
    named = list(_first_fetch(timeline))
    if index is not None:
        named += [*_first_calls(timeline), *_loading(timeline)]
    within = [(name, intersect(times, idle)) for name, times in named]
    every = np.concatenate([EMPTY, *(times for _, times in within)])
    lengths: dict[str, int] = {}
    for name, times in within:
        lengths[name] = lengths.get(name, 0) + int((times[:, 1] - times[:, 0]).sum())
    if sum(lengths.values()) < min(LEAST_NS, LEAST_FRACTION * (timeline.window_ns[1] - timeline.window_ns[0])):
        return StartUp(EMPTY, ())
    calls = sorted(((name, ns) for name, ns in lengths.items() if ns), key=lambda call: -call[1])
    return StartUp(union(every[:, 0], every[:, 1]), tuple(calls))


def worker_start(timeline: Timeline) -> Intervals:
    """The first fetch of a loop whose first step was recorded, from workers that begin only then."""
    return next((times for _, times in _first_fetch(timeline)), EMPTY)


def _idle(timeline: Timeline, index: int | None) -> Intervals:
    whole = np.array([timeline.window_ns], dtype=np.int64)
    if index is None:
        return whole
    busy = spans.covered(timeline, spans.device_items(timeline, index))
    return subtract(whole, joined(busy, unrecorded_times(timeline, index)))


def _of(timeline: Timeline, row: int) -> Intervals:
    start = timeline.start_ns[row : row + 1]
    return union(start, timeline.end_ns[row : row + 1])


def _first_fetch(timeline: Timeline) -> Iterator[tuple[str, Intervals]]:
    mine = spans.on_training_thread(timeline)
    fetches = np.flatnonzero(mine & spans.named(timeline, _is_of_workers))
    if not len(fetches) or not _begins_loop(timeline, int(fetches[0]), alone=len(fetches) == 1):
        return
    took = timeline.duration_ns[fetches]
    if took[0] >= LEAST_NS and took[0] > THAN_ANY * took[1:].max(initial=0):
        yield WORKERS, _of(timeline, int(fetches[0]))


def _begins_loop(timeline: Timeline, fetch: int, *, alone: bool) -> bool:
    """Whether it is the loop's first: in the step of that number, or `alone` and before all work, without any step."""
    mine = spans.on_training_thread(timeline)
    first = np.flatnonzero(mine & spans.named(timeline, spans.among(_FIRST_STEP)))
    if (mine & spans.named(timeline, spans.starting_with("ProfilerStep#"))).any():
        return bool((timeline.start_ns[fetch] < timeline.end_ns[first[:1]]).any())
    long = spans.in_category(timeline, Category.CPU_OP) & (timeline.duration_ns >= FIRST_NS)
    return alone and not (spans.launches(timeline) | long)[:fetch].any()


def _is_of_workers(name: str) -> bool:
    return spans.is_loader(name) and "_MultiProcessing" in name


def _first_calls(timeline: Timeline) -> Iterator[tuple[str, Intervals]]:
    """Calls of the runtime, and of operators that start work on the GPU, that take far longer than later ones.

    Later are those in the second half of the device's work. What waits for the device is none, and a call has no time
    that another has inside it.
    """
    trainer = spans.on_training_threads(timeline)
    runtime = trainer & spans.runtime_calls(timeline)
    waits = runtime & spans.named(timeline, spans.may_wait)
    operators = trainer & spans.in_category(timeline, Category.CPU_OP) & spans.named(timeline, _is_loading_operator)
    waiting = spans.covered(timeline, waits)
    launched = timeline.start_ns[trainer & spans.launches(timeline)]
    calls = runtime & ~waits
    edges = (timeline.end_ns[operators], timeline.start_ns[operators])
    calls[operators] = np.greater(*(np.searchsorted(launched, edge) for edge in edges))
    work = timeline.start_ns[spans.device_items(timeline)]
    half_ns = int(np.median(work)) if len(work) else 0
    long = np.flatnonzero(calls & (timeline.duration_ns >= FIRST_NS))
    for name in np.unique(timeline.name_id[long]).tolist():
        same = np.flatnonzero(calls & (timeline.name_id == name))
        later = timeline.duration_ns[same[timeline.start_ns[same] > half_ns]]
        usual_ns, any_ns = (np.median(later), later.max()) if len(later) else (LEAST_NS / LONGER, 0)
        limit_ns = max(FIRST_NS, LONGER * float(usual_ns), THAN_ANY * int(any_ns))
        for row in same[timeline.duration_ns[same] >= limit_ns].tolist():
            inside = long[(long > row) & (timeline.start_ns[long] < timeline.end_ns[row])]
            own = subtract(_of(timeline, row), union(timeline.start_ns[inside], timeline.end_ns[inside]))
            yield timeline.names[name], subtract(own, waiting)


def _is_loading_operator(name: str) -> bool:
    return name.startswith("aten::") and name not in _COPIES


def _loading(timeline: Timeline) -> Iterator[tuple[str, Intervals]]:
    """What the profiler itself names: modules loaded at their first use, and code compiled for this GPU."""
    rows = spans.in_category(timeline, Category.OVERHEAD) & spans.named(timeline, _is_loading)
    for row in np.flatnonzero(rows & (timeline.duration_ns > 0)).tolist():
        yield timeline.names[timeline.name_id[row]], _of(timeline, row)


def _is_loading(name: str) -> bool:
    return name.lower().startswith(("lazy function loading", "driver compiler"))
