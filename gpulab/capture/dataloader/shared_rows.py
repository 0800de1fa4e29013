"""SharedRows that worker processes write what they timed to and the training process reads, however they are started.

No file of it has a name, and none lies in /dev/shm, whose room in containers is small and belongs to the batches. Where
the system has no such memory, it is a tensor that torch shares, as a dataset's own tensors are.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

WORD = 8  # bytes
ROW = struct.Struct("12q")
ROW_WORDS = 12

_HEAD = 2  # words: whether to time, the most threads of a worker
_WORKER_HEAD = 1  # words: rows written so far
_ON, _THREADS = 0, 1


class SharedRows:
    """Room for the newest `rows` rows of each worker. Pickled for a worker, it is the same memory there.

    `on` is the training process's to set.
    """

    def __init__(self, workers: int, rows: int, source: Any = None) -> None:
        self.workers, self.rows = workers, rows
        self._worker_words = _WORKER_HEAD + rows * ROW_WORDS
        self._source = _new(WORD * (_HEAD + workers * self._worker_words)) if source is None else source
        self._words = memoryview(self._source.buffer).cast("B").cast("q")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return SharedRows, (self.workers, self.rows, self._source)

    @property
    def on(self) -> bool:
        return self._words[_ON] != 0

    @on.setter
    def on(self, wanted: bool) -> None:
        self._words[_ON] = int(wanted)

    @property
    def threads(self) -> int:
        """The most that an operator in a worker is split among; 0: no worker has said it."""
        return self._words[_THREADS]

    def has_threads(self, count: int) -> None:
        """By any worker, of itself."""
        self._words[_THREADS] = max(count, self._words[_THREADS])

    def written(self, worker: int) -> int:
        """Rows that this worker has written so far, those that newer ones have replaced too."""
        return self._words[self._head(worker)]

    def write(self, worker: int, row: tuple[int, ...]) -> None:
        """By that worker only."""
        head = self._head(worker)
        count = self._words[head]
        ROW.pack_into(self._source.buffer, self._place(head, count), *row)
        self._words[head] = count + 1

    def read(self, worker: int, first: int, last: int) -> list[tuple[int, ...]]:
        """Rows `first` to before `last`: at most as many as there is room for, none of them replaced."""
        head = self._head(worker)
        return [ROW.unpack_from(self._source.buffer, self._place(head, i)) for i in range(first, last)]

    def _head(self, worker: int) -> int:
        return _HEAD + worker * self._worker_words

    def _place(self, head: int, number: int) -> int:
        return WORD * (head + _WORKER_HEAD + number % self.rows * ROW_WORDS)


class _Unnamed:
    """Linux: memory known by a file descriptor alone."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._descriptor, self._bytes = descriptor, size_bytes
        self.buffer = mmap.mmap(descriptor, size_bytes)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        from multiprocessing.reduction import DupFd

        return _unnamed, (DupFd(self._descriptor), self._bytes)

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)


def _unnamed(passed: Any, size_bytes: int) -> _Unnamed:
    return _Unnamed(passed.detach(), size_bytes)


class _Tensor:
    """Elsewhere: a tensor in memory that torch shares."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.buffer = tensor.numpy()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _Tensor, (self._tensor,)


def _new(size_bytes: int) -> _Unnamed | _Tensor:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("gpulab-loading")
        os.ftruncate(descriptor, size_bytes)
        return _Unnamed(descriptor, size_bytes)
    import torch

    return _Tensor(torch.zeros(size_bytes, dtype=torch.uint8).share_memory_())  # type: ignore[no-untyped-call]
