"""The marks of a run in one growing table: a hook notes when and what, a reader finds out what it means."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from enum import IntEnum
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt

Marks = npt.NDArray[np.void]  # of MARK
Mark = Callable[[int, int], None]  # kind, argument

MARK = np.dtype([("t_ns", np.int64), ("kind", np.int64), ("argument", np.int64)])


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
    COMPILE = 18  # something was compiled in the newest step
    STOP = 19  # nothing that follows counts


class Tape:
    """Holds the marks of one thread. `mark(kind, argument)` reads the clock and keeps three numbers.

    They wait in a list, where a mark costs a third of what packing it costs between torch's operators, and is whole or
    not there: nothing interrupts `extend`. Whoever reads the tape packs them.
    """

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._table = array("q")
        extend, now = self._waiting.extend, perf_counter_ns

        def mark(kind: int, argument: int) -> None:
            extend((now(), kind, argument))

        self.mark: Mark = mark

    def marks(self) -> Marks:
        """All of them so far; a copy. From one thread at a time."""
        self._table.extend(packed := array("q", self._waiting[:]))
        del self._waiting[: len(packed)]
        return np.array(self._table, np.int64).view(MARK)
