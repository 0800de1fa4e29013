"""What one mark costs: measured once in a process, so that no step needs its own clock reads to tell gpulab's part.

It is the time inside of the mark, after other memory was read, without the clock reads around it. What a mark evicts
from the caches slows what comes after it; that is no part of it (`benchmarks/marks.py` measures both together).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns

from gpulab.tape.marks import Kind, Tape

CALLS = 200
_BETWEEN_BYTES = 16_384


@functools.cache
def mark_cost_ns() -> int:
    """Of one mark on a tape; the first call takes less than 2 ms. Own time of a step: its marks times that."""
    return round(cost_ns(Tape().mark))


def cost_ns(
    mark: Callable[[int, int], object], clock: Callable[[], int] = perf_counter_ns, calls: int = CALLS
) -> float:
    """The median of many calls, without what reading the clock takes: neither is disturbed by a neighbour for long."""
    between, whole, empty = bytes(_BETWEEN_BYTES), list[int](), list[int]()
    for _ in range(calls):
        between.count(b"\1")
        start_ns = clock()
        mark(Kind.HAND, 0)
        whole.append(clock() - start_ns)
        start_ns = clock()
        empty.append(clock() - start_ns)
    return max(0.0, median(whole) - median(empty))
