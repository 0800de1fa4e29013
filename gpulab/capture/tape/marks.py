"""One growing table of marks, written in place: the hook notes when and what, a reader finds out what it means."""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt

Marks = npt.NDArray[np.void]  # of MARK
Mark = Callable[[int, int], None]  # kind, argument

MARK = np.dtype([("t_ns", np.int64), ("kind", np.uint8), ("argument", np.int64)])
MARKS_IN_BLOCK = 16_384
_ROW = struct.Struct("=qBq")


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
    """Holds the marks of one thread. `mark(kind, argument)` reads the clock and packs 17 bytes."""

    def __init__(self) -> None:
        self._blocks: list[bytearray] = []
        self.mark, self._size = _writer(self._blocks)

    def marks(self, first: int = 0) -> Marks:
        """Those from number `first` on; a copy. From any thread."""
        count = self._size()
        skipped, at = divmod(first, MARKS_IN_BLOCK)
        blocks = [np.frombuffer(block, MARK) for block in self._blocks[skipped:]]
        whole: Marks = np.concatenate(blocks) if blocks else np.empty(0, MARK)
        return whole[at : count - skipped * MARKS_IN_BLOCK]


def _writer(blocks: list[bytearray]) -> tuple[Mark, Callable[[], int]]:
    """The closure that writes, and how many marks it has written. A mark counts once it is whole."""
    pack_into, now, width = _ROW.pack_into, perf_counter_ns, _ROW.size
    size = MARKS_IN_BLOCK * width
    block, at = bytearray(size), 0
    blocks.append(block)

    def mark(kind: int, argument: int) -> None:
        nonlocal at, block
        if at == size:
            block = bytearray(size)
            blocks.append(block)
            at = 0
        pack_into(block, at, now(), kind, argument)
        at += width

    def count() -> int:
        return (len(blocks) - 1) * MARKS_IN_BLOCK + at // width

    return mark, count
