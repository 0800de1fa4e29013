"""The marks of a run in one growing table: hooks record what happened and when, readers interpret it.

The cost of one mark is measured once per process, so that gpulab's share of a step needs no extra clock reads. It is
the time inside the mark after other memory was read, without the clock reads around it. A mark also evicts cache lines
and so slows the code after it; `benchmarks/marks.py` measures both together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import IntEnum
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Marks = npt.NDArray[np.void]  # of MARK
Act = Callable[[int, int, int, Any], None]  # time, kind, argument, subject


class Mark(Protocol):
    """Writes a mark. `subject`, the object that it concerns, is only for `act`."""

    def __call__(self, kind: int, argument: int, subject: Any = None, /) -> None: ...


MARK = np.dtype([("t_ns", np.int64), ("kind", np.int64), ("argument", np.int64)])
NEVER = 1 << 62


class Kind(IntEnum):
    """What happened; in brackets the mark's argument."""

    BEGIN = 0  # the user's code begins
    ITER = 1  # the loop requests an iterator from a DataLoader (the loader's number)
    ITERATOR = 2  # the loader has returned an iterator, or raised
    ASK = 3  # the loop requests a batch from an iterator (the loader's number)
    GOT = 4  # the iterator has returned a batch (samples; -1: unknown)
    END = 5  # the iterator had no batch left, or raised
    UPDATED = 6  # weights have changed since the first backward pass, and no optimizer stepped
    BACKWARD = 7  # a backward pass begins (1: weights have changed since the last one, and no optimizer stepped)
    BACKWARD_END = 8
    GRAD = 9  # torch.autograd.grad (as BACKWARD)
    STEP = 10  # Optimizer.step begins (the optimizer's id)
    STEPPED = 11  # Optimizer.step has returned (id)
    SCALE = 12  # GradScaler.step begins (the optimizer's id)
    SCALED = 13  # GradScaler.step has returned, whether or not the optimizer stepped
    SCALE_FAILED = 14  # GradScaler.step raised
    HAND = 15  # gpulab.step()
    RESUME = 16  # gpulab's own work ends (1: on the profiler)
    PHASE = 17  # steps that end from now on belong to this phase (Phase)
    COMPILE = 18  # torch has compiled something
    STOP = 19  # later marks do not count
    OWN = 20  # gpulab's own work took this long (ns)
    GRAD_OFF = 21  # gradients are switched off
    GRAD_ON = 22  # gradients are as before
    EVAL = 23  # a model is switched to evaluation
    TRAIN = 24  # a model is switched back to training


class Tape:
    """Holds the marks of one thread. `mark(kind, argument, subject)` reads the clock and stores three numbers.

    The numbers go into a list: that costs a third of packing them between torch's operators, and nothing interrupts
    `extend`, so every mark is complete. Readers pack the marks. A mark calls `act(t_ns, kind, argument, subject)` on
    its thread for the kinds passed to `subscribe`, and once as many marks wait for packing as `wake_at` says.
    """

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self.packed_count = 0  # number of packed marks
        self.chunks: list[Marks] = []  # packed marks, until the reader drops them
        self._prepare()

    def _prepare(self) -> None:
        waiting, now = self._waiting, perf_counter_ns
        extend, wake = waiting.extend, 3 * NEVER
        subscribed: frozenset[int] = frozenset()
        act: Act = _nothing

        def mark(kind: int, argument: int, subject: Any = None) -> None:
            extend((t_ns := now(), kind, argument))
            if len(waiting) >= wake or kind in subscribed:
                act(t_ns, kind, argument, subject)

        def wake_at(count: int) -> None:
            nonlocal wake
            wake = 3 * count

        def subscribe(kinds: frozenset[int], how: Act) -> None:
            nonlocal subscribed, act
            subscribed, act = kinds, how

        self.mark: Mark = mark
        self.wake_at, self.subscribe = wake_at, subscribe

    def note(self, kind: int, argument: int) -> int:
        """Write a mark without calling `act`; return its time."""
        self._waiting.extend((t_ns := perf_counter_ns(), kind, argument))
        return t_ns

    @property
    def count(self) -> int:
        """Marks so far; may be too high while another thread packs some."""
        return self.packed_count + len(self._waiting) // 3

    def pack(self) -> None:
        """Move waiting marks to `chunks`, from one thread at a time. The next mark calls `act`."""
        waiting = self._waiting[:]
        count = len(waiting)
        if not count:
            return
        marks = np.array(waiting, np.int64).view(MARK)
        packed_count = self.packed_count + len(marks)
        # no call from here on, so that no signal comes in between: each mark is in exactly one of the two places
        self.packed_count = packed_count
        self.chunks += (marks,)
        del self._waiting[:count]
        self.wake_at(0)

    def marks(self) -> Marks:
        """A copy of all marks, if no chunk was dropped."""
        self.pack()
        return np.concatenate([*self.chunks, np.empty(0, MARK)])


def _nothing(t_ns: int, kind: int, argument: int, subject: Any) -> None:
    """The action until `subscribe` is called."""


CALLS = 200
_BETWEEN_BYTES = 16_384


@functools.cache
def mark_cost_ns() -> int:
    """The cost of one mark; the first call takes less than 2 ms. A step's own cost is this times its marks."""
    return round(cost_ns(Tape().mark))


def cost_ns(
    mark: Callable[[int, int], object], clock: Callable[[], int] = perf_counter_ns, calls: int = CALLS
) -> float:
    """The median cost of a call of `mark`, minus that of reading the clock; medians are robust to disturbances."""
    between, whole, empty = bytes(_BETWEEN_BYTES), list[int](), list[int]()
    for _ in range(calls):
        between.count(b"\1")
        start_ns = clock()
        mark(Kind.HAND, 0)
        whole.append(clock() - start_ns)
        start_ns = clock()
        empty.append(clock() - start_ns)
    return max(0.0, float(np.median(whole) - np.median(empty)))
