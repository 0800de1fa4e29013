"""Rows of whole numbers as they are timed, in the training process or in memory that it shares with a loader's workers.

No file of that memory has a name, and none lies in /dev/shm, whose room in containers is small and belongs to the
batches. Where the system has no such memory, it is a tensor that torch shares, as a dataset's own tensors are.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from gpulab.run import Int64

_WORD = 8  # bytes
_HEAD = 2  # words: whether to time, the most threads of a worker
_ON, _THREADS = 0, 1


class Rows:
    """The newest rows of so many numbers each, as many as fit into `words`. One process writes them.

    `count` is of all that were written, those that newer ones have replaced too.
    """

    def __init__(self, words: memoryview, width: int) -> None:
        self.most = (len(words) - 1) // width
        self._words = words
        self._row_bytes = _WORD * width
        self._pack_into = struct.Struct(f"{width}q").pack_into
        self._table: Int64 = np.frombuffer(words, np.int64)[1:].reshape(self.most, width)

    @classmethod
    def here(cls, width: int, most: int) -> Rows:
        """In memory of this process alone, which takes no room before it is written to."""
        return cls(np.zeros(1 + most * width, np.int64).data, width)

    @property
    def count(self) -> int:
        return int(self._words[0])

    def append(self, row: tuple[int, ...]) -> None:
        count = self._words[0]
        self._pack_into(self._words, _WORD + count % self.most * self._row_bytes, *row)
        self._words[0] = count + 1

    def between(self, first: int, last: int) -> Int64:
        """A copy of the rows from number `first` to before `last`, without those that newer ones have replaced."""
        return self._table[np.arange(max(first, last - self.most), last) % self.most]

    def numbered(self, numbers: Int64) -> Int64:
        """The rows of these numbers; -1 in all columns for one that is not there."""
        is_there = (numbers >= max(0, self.count - self.most)) & (numbers < self.count)
        return np.where(is_there[:, None], self._table[numbers % self.most], -1)


class SharedRows:
    """The newest `most` rows of each worker. Pickled for a worker, it is the same memory there.

    `on` is the training process's to set.
    """

    def __init__(self, workers: int, width: int, most: int, source: Any = None) -> None:
        each = 1 + most * width
        self._made_of = workers, width, most
        self._source = _new(_WORD * (_HEAD + workers * each)) if source is None else source
        buffer = self._source.buffer if isinstance(self._source, _Unnamed) else self._source.numpy()
        self._words = memoryview(buffer).cast("B").cast("q")
        self.of_worker = [Rows(self._words[i : i + each], width) for i in range(_HEAD, len(self._words), each)]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return SharedRows, (*self._made_of, self._source)

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


def _new(size_bytes: int) -> Any:
    """Such memory, or elsewhere a tensor in memory that torch shares."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("gpulab-loading")
        os.ftruncate(descriptor, size_bytes)
        return _Unnamed(descriptor, size_bytes)
    import torch

    return torch.zeros(size_bytes, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
