"""The steps of a trace nobody prepared for us: from the profiler's own marks, the loader's, the optimizer's, or none.

In that order; the first that gives a step wins. Only spans on the training thread count: the copies that Kineto puts on
the device (gpu_user_annotation) would count every step twice.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import Struct

from gpulab.intervals import Intervals, paint, union
from gpulab.run import Category, Int64, Phase, StepFlag, Steps, Timeline
from gpulab.timeline import spans
from gpulab.timeline.start_up import worker_start

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
