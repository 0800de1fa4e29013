"""The steps of a trace nobody prepared for us, and what happens only once, at its first calls.

Steps are found from the profiler's own marks, the loader's or the optimizer's, in that order; the first that gives a
step wins. Only spans on the training thread count: the copies that Kineto puts on the device (gpu_user_annotation)
would count every step twice.

At the start libraries are loaded, the GPU's context is created, workers are started. No step is like it. A call counts
where it takes far longer than such calls do later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from msgspec import Struct

from gpulab.intervals import EMPTY, Intervals, intersect, joined, paint, subtract, union
from gpulab.run import Category, Int64, Phase, StepFlag, Steps, Timeline
from gpulab.timeline import spans
from gpulab.timeline.launches import unrecorded_times

WHOLE_WINDOW = "whole window"
CUT = 0.5  # ours: a first step has more operators than others, to set up its optimizer, but not twice as many


class FoundSteps(Struct, frozen=True):
    """Steps with the marks they come from.

    `duplicate_marks`: marks with a number that was there already, or inside another mark; `missing_numbers`: gaps in
    the numbering. Without any mark there is no step: the whole window stands as one, `traced_numbers` is empty.
    """

    steps: Steps
    source: str  # "ProfilerStep", "DataLoader", "Optimizer.step", "whole window"
    traced_numbers: tuple[int, ...]
    duplicate_marks: int = 0
    missing_numbers: int = 0


class _Windows(Struct, frozen=True):
    number: Int64
    start_ns: Int64
    end_ns: Int64
    duplicates: int = 0
    missing: int = 0


def find_steps(timeline: Timeline) -> FoundSteps:
    """The steps of a loaded trace, with the time each waited for data and spent in the optimizer."""
    finders: tuple[tuple[str, Callable[[Timeline], _Windows | None]], ...] = (
        ("ProfilerStep", _profiler_steps),
        ("DataLoader", _between_fetches),
        ("Optimizer.step", _between_updates),
    )
    for source, find in finders:
        windows = find(timeline)
        if windows is not None:
            steps = _steps(timeline, windows)
            return FoundSteps(steps, source, tuple(steps.number.tolist()), windows.duplicates, windows.missing)
    return FoundSteps(Steps.empty(), WHOLE_WINDOW, ())


def _marks(timeline: Timeline, test: Callable[[str], bool]) -> Int64:
    """Annotations of that name on the training thread, by start."""
    mine = spans.on_training_thread(timeline) & spans.in_category(timeline, Category.USER_ANNOTATION)
    return np.flatnonzero(mine & spans.named(timeline, test))


def _profiler_steps(timeline: Timeline) -> _Windows | None:
    numbers = {i: n for i, name in enumerate(timeline.names) if (n := _step_number(name)) is not None}
    rows = _marks(timeline, lambda name: _step_number(name) is not None)
    rows = rows[timeline.duration_ns[rows] > 0]
    if len(rows) == 0:
        return None
    number = np.array([numbers[i] for i in timeline.name_id[rows].tolist()], np.int64)
    start, end = timeline.start_ns[rows], timeline.end_ns[rows]
    first = np.zeros(len(number), bool)
    first[np.unique(number, return_index=True)[1]] = True
    keep = first & ~_inside_earlier(start, end)
    if keep.sum() == 2 and _is_cut(timeline, *rows[keep].tolist()):
        return None
    duplicates = int((~keep).sum())
    number, start, end = number[keep], start[keep], end[keep]
    end = np.minimum(end, np.append(start[1:], np.iinfo(np.int64).max))  # rounded to µs they may overlap by one
    distinct = len(np.unique(number))
    return _Windows(number, start, end, duplicates, int(number.max() - number.min()) + 1 - distinct)


def _is_cut(timeline: Timeline, first: int, second: int) -> bool:
    """Whether one of two steps is but a part of one, by its operators."""
    begun = timeline.start_ns[spans.on_training_threads(timeline) & spans.in_category(timeline, Category.CPU_OP)]
    edges = np.searchsorted(begun, [[timeline.start_ns[row], timeline.end_ns[row]] for row in (first, second)])
    counts = np.diff(edges, axis=1)
    return bool(counts.min() < CUT * counts.max())


def _step_number(name: str) -> int | None:
    prefix, _, number = name.partition("#")
    is_number = number.isascii() and number.isdigit() and len(number) < 19
    return int(number) if prefix == "ProfilerStep" and is_number else None


def _inside_earlier(start: Int64, end: Int64) -> spans.Mask:
    """Rows that end within one that began before them."""
    reached = np.maximum.accumulate(end)
    return np.append(False, end[1:] <= reached[:-1]) if len(start) else np.zeros(0, bool)


def _between_fetches(timeline: Timeline) -> _Windows | None:
    """A step from the start of one fetch to the start of the next."""
    rows = _marks(timeline, spans.is_loader)
    rows = rows[~_inside_earlier(timeline.start_ns[rows], timeline.end_ns[rows])]
    return _between(timeline.start_ns[rows])


def _between_updates(timeline: Timeline) -> _Windows | None:
    """A step from the end of one update to the end of the next, of the optimizer that steps most often."""
    rows = _marks(timeline, spans.starting_with("Optimizer.step#"))
    if len(rows) == 0:
        return None
    ids, counts = np.unique(timeline.name_id[rows], return_counts=True)
    rows = rows[timeline.name_id[rows] == ids[counts.argmax()]]
    return _between(np.sort(timeline.end_ns[rows]))


def _between(edges: Int64) -> _Windows | None:
    edges = np.unique(edges)
    if len(edges) < 2:
        return None
    return _Windows(np.arange(len(edges) - 1, dtype=np.int64), edges[:-1], edges[1:])


def _steps(timeline: Timeline, windows: _Windows) -> Steps:
    n = len(windows.start_ns)
    bounds = np.stack((windows.start_ns, windows.end_ns), axis=1)
    fetches = _marks(timeline, spans.is_loader)
    updates = _marks(timeline, spans.is_optimizer)
    flags = np.zeros(n, np.uint8)
    flags[0] |= StepFlag.FIRST
    flags[-1] |= StepFlag.LAST
    return Steps(
        number=windows.number,
        start_ns=windows.start_ns,
        end_ns=windows.end_ns,
        data_wait_ns=_within(bounds, timeline, fetches) - paint(bounds, [worker_start(timeline)])[:, 0],
        optimizer_ns=_within(bounds, timeline, updates),
        batch_count=_count(bounds, timeline, fetches),
        sample_count=np.full(n, -1, np.int64),
        phase=np.full(n, Phase.TRACED, np.uint8),
        flags=flags,
    )


def _within(bounds: Intervals, timeline: Timeline, rows: Int64) -> Int64:
    return paint(bounds, [union(timeline.start_ns[rows], timeline.end_ns[rows])])[:, 0]


def _count(bounds: Intervals, timeline: Timeline, rows: Int64) -> Int64:
    """Fetches that begin in each step; one inside another is the same fetch."""
    starts = timeline.start_ns[rows[~_inside_earlier(timeline.start_ns[rows], timeline.end_ns[rows])]]
    return np.searchsorted(starts, bounds[:, 1]) - np.searchsorted(starts, bounds[:, 0])


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
