"""The steps of a trace that was recorded without gpulab, and its start-up: work that happens only at first calls.

Steps are found from the marks of the profiler, the loader or the optimizer, in that order; the first source that gives
a step is used. Only spans on the training thread count: the copies that Kineto puts on the device (gpu_user_annotation)
would count every step twice.

At start-up, libraries are loaded, the GPU's context is created and workers are started, unlike in any step. A call
counts as start-up if it takes far longer than later calls of its kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
from msgspec import Struct

from gpulab.intervals import EMPTY, Intervals, intersect, joined, measure, paint, subtract
from gpulab.run import Int64, Phase, StepFlag, Steps, Timeline
from gpulab.timeline.labels import (
    CALLS,
    LAUNCHES,
    OPERATORS,
    WAITS,
    WORK,
    Labels,
    Mask,
    Rows,
    What,
    Where,
    distinct,
    labels,
    once,
)
from gpulab.timeline.launches import unrecorded_times

WHOLE_WINDOW = "whole window"
CUT = 0.5  # ours: a first step has more operators than others, to set up its optimizer, but fewer than twice as many


class FoundSteps(Struct, frozen=True):
    """Steps with the source of their marks.

    `duplicate_marks`: marks with a repeated number, or inside another mark; `missing_numbers`: gaps in the numbering.
    Without any mark there is no step: the whole window counts as one, `traced_numbers` is empty.
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
    """The steps of a loaded trace, each with its wait for data and its time in the optimizer."""
    spans = labels(timeline)
    finders: tuple[tuple[str, Callable[[Labels], _Windows | None]], ...] = (
        ("ProfilerStep", _profiler_steps),
        ("DataLoader", _between_fetches),
        ("Optimizer.step", _between_updates),
    )
    for source, find in finders:
        windows = find(spans)
        if windows is not None:
            steps = _steps(spans, windows)
            return FoundSteps(steps, source, tuple(steps.number.tolist()), windows.duplicates, windows.missing)
    return FoundSteps(Steps.empty(), WHOLE_WINDOW, ())


def _marks(spans: Labels, *kinds: What) -> Rows:
    """The marks of these kinds on the training thread itself, by start."""
    return np.flatnonzero(spans.of(*kinds) & (spans.where == Where.TRAINER))


def _profiler_steps(spans: Labels) -> _Windows | None:
    numbers = np.array([_step_number(name) for name in spans.names], np.int64)
    rows = _marks(spans, What.STEP)
    rows = rows[(spans.duration_ns[rows] > 0) & (numbers[spans.name_id[rows]] >= 0)]
    if len(rows) == 0:
        return None
    number = numbers[spans.name_id[rows]]
    start, end = spans.start_ns[rows], spans.end_ns[rows]
    first = np.zeros(len(number), bool)
    first[np.unique(number, return_index=True)[1]] = True
    keep = first & ~_inside_earlier(start, end)
    if keep.sum() == 2 and _is_cut(spans, rows[keep]):
        return None
    duplicates = int((~keep).sum())
    number, start, end = number[keep], start[keep], end[keep]
    end = np.minimum(end, np.append(start[1:], np.iinfo(np.int64).max))  # rounded to µs they may overlap by one
    return _Windows(number, start, end, duplicates, int(number.max() - number.min()) + 1 - len(number))


def _is_cut(spans: Labels, two: Rows) -> bool:
    """Whether one of two steps is incomplete, judged by its number of operators."""
    begun = spans.start_ns[spans.training(*OPERATORS)]
    counts = np.searchsorted(begun, spans.end_ns[two]) - np.searchsorted(begun, spans.start_ns[two])
    return bool(counts.min() < CUT * counts.max())


def _step_number(name: str) -> int:
    """The number of a profiler step; -1 for other names."""
    prefix, _, number = name.partition("#")
    is_number = number.isascii() and number.isdigit() and len(number) < 19
    return int(number) if prefix == "ProfilerStep" and is_number else -1


def _inside_earlier(start: Int64, end: Int64) -> Mask:
    """Rows that end within an earlier row."""
    reached = np.maximum.accumulate(end)
    return np.append(False, end[1:] <= reached[:-1]) if len(start) else np.zeros(0, bool)


def _fetches(spans: Labels) -> Rows:
    """The fetches of the loader; a fetch inside another is the same fetch."""
    rows = _marks(spans, What.LOADER)
    return rows[~_inside_earlier(spans.start_ns[rows], spans.end_ns[rows])]


def _between_fetches(spans: Labels) -> _Windows | None:
    """Steps from the start of one fetch to the start of the next."""
    return _between(spans.start_ns[_fetches(spans)])


def _between_updates(spans: Labels) -> _Windows | None:
    """Steps from the end of one update to the end of the next, of the optimizer that steps most often."""
    rows = _marks(spans, What.UPDATE)
    if len(rows) == 0:
        return None
    rows = rows[spans.name_id[rows] == np.bincount(spans.name_id[rows]).argmax()]
    return _between(spans.end_ns[rows])


def _between(edges: Int64) -> _Windows | None:
    edges = np.unique(edges)
    if len(edges) < 2:
        return None
    return _Windows(np.arange(len(edges) - 1, dtype=np.int64), edges[:-1], edges[1:])


def _steps(spans: Labels, windows: _Windows) -> Steps:
    n = len(windows.start_ns)
    bounds = np.stack((windows.start_ns, windows.end_ns), axis=1)
    updates = spans.times(_marks(spans, What.UPDATE, What.ZEROING))
    starts = spans.start_ns[_fetches(spans)]
    flags = np.zeros(n, np.uint8)
    flags[0] |= StepFlag.FIRST
    flags[-1] |= StepFlag.LAST
    return Steps(
        number=windows.number,
        start_ns=windows.start_ns,
        end_ns=windows.end_ns,
        data_wait_ns=paint(bounds, [worker_start(spans), spans.loading])[:, 1],
        optimizer_ns=paint(bounds, [updates])[:, 0],
        batch_count=np.searchsorted(starts, bounds[:, 1]) - np.searchsorted(starts, bounds[:, 0]),
        sample_count=np.full(n, -1, np.int64),
        phase=np.full(n, Phase.TRACED, np.uint8),
        flags=flags,
    )


# Ours. In seven real traces that began after the start-up, only waits and copies take more than 20 ms.
LEAST_NS = 100_000_000  # least of a fetch, of a call without a later one to compare, and of their sum,
LEAST_FRACTION = 0.15  # or share of the window: less hides no other cause
FIRST_NS = 1_000_000  # least of a first call
LONGER = 20.0  # times the later calls of the same name
THAN_ANY = 2.0  # times any later fetch
_COPIES = ("aten::copy_", "aten::to", "aten::_to_copy", "aten::item", "aten::_local_scalar_dense")
WORKERS = "waiting for the DataLoader's workers"


class StartUp(Struct, frozen=True):
    """`times`: when; `calls`: the names of the calls with their duration (ns), the longest first."""

    times: Intervals
    calls: tuple[tuple[str, int], ...]


@once
def start_up(spans: Labels, index: int | None) -> StartUp:
    """The start-up while that GPU is idle; on a CPU (None), only the start of the DataLoader's workers."""
    idle = np.array([spans.window_ns], dtype=np.int64)
    named = [(WORKERS, worker_start(spans))]
    if index is not None:
        busy = spans.times(spans.on_device(index))
        idle = subtract(idle, joined(busy, unrecorded_times(spans, index)))
        named += [*_first_calls(spans), *_loading(spans)]
    within = [(name, intersect(times, idle)) for name, times in named if len(times)]
    lengths: Counter[str] = Counter()
    for name, times in within:
        lengths[name] += measure(times)
    if lengths.total() < min(LEAST_NS, LEAST_FRACTION * (spans.window_ns[1] - spans.window_ns[0])):
        return StartUp(EMPTY, ())
    calls = sorted(((name, ns) for name, ns in lengths.items() if ns), key=lambda call: -call[1])
    return StartUp(joined(*(times for _, times in within)), tuple(calls))


def worker_start(spans: Labels) -> Intervals:
    """The first fetch of a loop whose first step was recorded, if its workers start only then."""
    fetches = _marks(spans, What.LOADER)
    fetches = fetches[spans.named(lambda name: "_MultiProcessing" in name, fetches)]
    if not len(fetches) or not _begins_loop(spans, int(fetches[0]), alone=len(fetches) == 1):
        return EMPTY
    took = spans.duration_ns[fetches]
    is_long = took[0] >= LEAST_NS and took[0] > THAN_ANY * took[1:].max(initial=0)
    return spans.times(fetches[:1]) if is_long else EMPTY


def _begins_loop(spans: Labels, fetch: int, *, alone: bool) -> bool:
    """Whether the fetch is the loop's first: in the first step or, without steps, `alone` and before all work."""
    steps = _marks(spans, What.STEP)
    numbered = [(row, spans.names[spans.name_id[row]]) for row in steps.tolist()]
    numbered = [(row, name) for row, name in numbered if name.startswith("ProfilerStep#")]
    if numbered:
        first = next((row for row, name in numbered if name == "ProfilerStep#0"), None)
        return first is not None and bool(spans.start_ns[fetch] < spans.start_ns[first] + spans.duration_ns[first])
    long = spans.of(*OPERATORS) & (spans.duration_ns >= FIRST_NS)
    return alone and not (spans.of(*LAUNCHES) | long)[:fetch].any()


def _first_calls(spans: Labels) -> Iterator[tuple[str, Intervals]]:
    """Calls of the runtime, and of operators that start GPU work, that take far longer than later calls.

    Later calls are those in the second half of the device's work. Calls that wait for the device are excluded, and the
    time of a nested call counts only once.
    """
    waits = spans.training(*WAITS, What.COPY_CALL)
    calls = spans.training(*CALLS) & ~waits
    loading = spans.named(lambda name: name.startswith("aten::") and name not in _COPIES)
    operators = spans.training(*OPERATORS) & loading
    waiting = spans.times(waits)
    launched = spans.start_ns[spans.training(*LAUNCHES)]
    edges = (spans.end_ns[operators], spans.start_ns[operators])
    calls[operators] = np.greater(*(np.searchsorted(launched, edge) for edge in edges))
    work = spans.start_ns[spans.of(*WORK)]
    half_ns = int(np.median(work)) if len(work) else 0
    long = np.flatnonzero(calls & (spans.duration_ns >= FIRST_NS))
    for name in distinct(spans.name_id[long]):
        same = np.flatnonzero(calls & (spans.name_id == name))
        later = spans.duration_ns[same[spans.start_ns[same] > half_ns]]
        usual_ns, any_ns = (np.median(later), later.max()) if len(later) else (LEAST_NS / LONGER, 0)
        limit_ns = max(FIRST_NS, LONGER * float(usual_ns), THAN_ANY * int(any_ns))
        for row in same[spans.duration_ns[same] >= limit_ns].tolist():
            inside = long[(long > row) & (spans.start_ns[long] < spans.start_ns[row] + spans.duration_ns[row])]
            own = subtract(spans.times(np.array([row])), spans.times(inside))
            yield spans.names[name], subtract(own, waiting)


def _loading(spans: Labels) -> Iterator[tuple[str, Intervals]]:
    """Start-up that the profiler itself names: modules loaded at their first use, and code compiled for this GPU."""
    loading = spans.named(lambda name: name.lower().startswith(("lazy function loading", "driver compiler")))
    for row in np.flatnonzero(spans.of(What.OVERHEAD) & loading & (spans.duration_ns > 0)):
        yield spans.names[spans.name_id[row]], spans.times(np.array([row]))
