"""The marks of a run in one growing table: a hook notes when and what, a reader finds out what it means.

What one mark costs is measured once in a process, so that no step needs its own clock reads to tell gpulab's part: the
time inside of the mark, after other memory was read, without the clock reads around it. What a mark evicts from the
caches slows what comes after it; that is no part of it (`benchmarks/marks.py` measures both together).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import IntEnum
from statistics import median
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Marks = npt.NDArray[np.void]  # of MARK
Act = Callable[[int, int, int, Any], None]  # time, kind, argument, what it is about


class Mark(Protocol):
    """Writes a mark; `subject`: what it is about, for who acts at once."""

    def __call__(self, kind: int, argument: int, subject: Any = None, /) -> None: ...


MARK = np.dtype([("t_ns", np.int64), ("kind", np.int64), ("argument", np.int64)])
NEVER = 1 << 62


class Kind(IntEnum):
    """What a mark says; in brackets its argument."""

    BEGIN = 0  # the user's code begins
    ITER = 1  # a DataLoader is asked for an iterator (its number)
    ITERATOR = 2  # it gave one, or raised
    ASK = 3  # an iterator is asked for a batch (number of its loader)
    GOT = 4  # it gave one (samples, -1: unknown)
    END = 5  # it had none left, or raised
    UPDATED = 6  # weights have changed since the first backward pass, and no optimizer stepped
    BACKWARD = 7  # a backward pass begins (1: weights have changed since the last one, and no optimizer stepped)
    BACKWARD_END = 8
    GRAD = 9  # torch.autograd.grad (as BACKWARD)
    STEP = 10  # an optimizer is about to step (its id)
    STEPPED = 11  # it has stepped (id)
    SCALE = 12  # GradScaler is to step an optimizer (id)
    SCALED = 13  # it has, or decided that it should not
    SCALE_FAILED = 14  # it raised
    HAND = 15  # gpulab.step()
    RESUME = 16  # gpulab was at work until now (1: on the profiler)
    PHASE = 17  # steps that end from now on are of this phase (Phase)
    COMPILE = 18  # something was compiled
    STOP = 19  # nothing that follows counts
    OWN = 20  # gpulab itself was at work (ns)
    GRAD_OFF = 21  # gradients are switched off
    GRAD_ON = 22  # they are as before
    EVAL = 23  # a model is switched to evaluation
    TRAIN = 24  # and back


class Tape:
    """Holds the marks of one thread. `mark(kind, argument, subject)` reads the clock and keeps three numbers.

    They wait in a list, where a mark costs a third of what packing it costs between torch's operators, and is whole or
    not there: nothing interrupts `extend`. Whoever reads the tape packs them. Once so many wait as `wake_at` said, and
    at the kinds of `heed`, each mark calls `act(t_ns, kind, argument, subject)` on the thread that marks.
    """

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self.taken = 0  # marks
        self.chunks: list[Marks] = []  # what was taken, until somebody who has no use for it any more drops it
        self._prepare()

    def _prepare(self) -> None:
        waiting, now = self._waiting, perf_counter_ns
        extend, wake = waiting.extend, 3 * NEVER
        heeded: frozenset[int] = frozenset()
        act: Act = _nothing

        def mark(kind: int, argument: int, subject: Any = None) -> None:
            extend((t_ns := now(), kind, argument))
            if len(waiting) >= wake or kind in heeded:
                act(t_ns, kind, argument, subject)

        def wake_at(count: int) -> None:
            nonlocal wake
            wake = 3 * count

        def heed(kinds: frozenset[int], how: Act) -> None:
            nonlocal heeded, act
            heeded, act = kinds, how

        self.mark: Mark = mark
        self.wake_at, self.heed = wake_at, heed

    def note(self, kind: int, argument: int) -> int:
        """A mark that calls nobody; its time."""
        self._waiting.extend((t_ns := perf_counter_ns(), kind, argument))
        return t_ns

    @property
    def count(self) -> int:
        """Marks so far; while another thread takes some it may be too high."""
        return self.taken + len(self._waiting) // 3

    def take(self) -> None:
        """Move those that wait to `chunks`, from one thread at a time. The next mark wakes whoever acts."""
        waiting = self._waiting[:]
        count = len(waiting)
        if not count:
            return
        marks = np.array(waiting, np.int64).view(MARK)
        taken = self.taken + len(marks)
        # no call from here on, so no signal in between: a mark is in one of both, once
        self.taken = taken
        self.chunks += (marks,)
        del self._waiting[:count]
        self.wake_at(0)

    def marks(self) -> Marks:
        """All of them, where none were dropped; a copy."""
        self.take()
        return np.concatenate([*self.chunks, np.empty(0, MARK)])


def _nothing(t_ns: int, kind: int, argument: int, subject: Any) -> None:
    """Nobody acts."""


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
