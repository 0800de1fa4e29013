"""Stores the times of batches as rows of integers, in the training process or in memory shared with workers.

The shared memory is not in /dev/shm, whose space in containers is small and needed for batches. If the system has no
such memory, a shared tensor of torch takes its place.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from gpulab.run import Batches, Int64

FETCH = (  # if transforms were not timed, their times are -1 and part of reading
    "start_ns",
    "end_ns",
    "read_ns",
    "transform_ns",
    "collate_ns",
    "read_cpu_ns",
    "transform_cpu_ns",
    "collate_cpu_ns",
    "item_count",
    "core_wait_ns",
)
OF_WORKER = ("epoch", "number", *FETCH)
ANSWER = ("asked_ns", "answered_ns", "pin_ns")  # when the loop requested a batch, and when it got it
BATCH = ("worker", *FETCH, *ANSWER, "stands_for")
_TIMES = ("start_ns", "end_ns", "asked_ns", "answered_ns")
_CLOCKS_APART_NS = 1_000_000

_WORD = 8  # bytes
_HEAD = 2  # words: whether to time, and how many threads an operator in a worker uses at most
_ON, _THREADS = 0, 1


class Rows:
    """A ring of the newest rows of `width` numbers, as many as fit into `words`. Only one process writes to it.

    `count` includes rows that newer rows have replaced.
    """

    def __init__(self, words: memoryview, width: int) -> None:
        self.most = (len(words) - 1) // width
        self._words = words
        self._row_bytes = _WORD * width
        self._pack_into = struct.Struct(f"{width}q").pack_into
        self._table: Int64 = np.frombuffer(words, np.int64)[1:].reshape(self.most, width)

    @classmethod
    def here(cls, width: int, most: int) -> Rows:
        """Rows in memory of this process, which takes no space before it is written to."""
        return cls(np.zeros(1 + most * width, np.int64).data, width)

    @property
    def count(self) -> int:
        return int(self._words[0])

    def append(self, row: tuple[int, ...]) -> None:
        count = self._words[0]
        self._pack_into(self._words, _WORD + count % self.most * self._row_bytes, *row)
        self._words[0] = count + 1

    def between(self, first: int, last: int) -> Int64:
        """A copy of rows `first` to `last` - 1, without those that newer rows have replaced."""
        return self._table[np.arange(max(first, last - self.most), last) % self.most]

    def numbered(self, numbers: Int64) -> Int64:
        """The rows with these numbers; -1 in all columns of a missing row."""
        is_there = (numbers >= max(0, self.count - self.most)) & (numbers < self.count)
        return np.where(is_there[:, None], self._table[numbers % self.most], -1)


class SharedRows:
    """The newest `most` rows of each worker. A pickled copy in a worker uses the same memory.

    Only the training process sets `on`.
    """

    def __init__(self, workers: int, width: int, most: int, source: Any = None) -> None:
        each = 1 + most * width
        self._shape = workers, width, most
        self._source = _new(_WORD * (_HEAD + workers * each)) if source is None else source
        buffer = self._source.buffer if isinstance(self._source, _Unnamed) else self._source.numpy()
        self._words = memoryview(buffer).cast("B").cast("q")
        self.of_worker = [Rows(self._words[i : i + each], width) for i in range(_HEAD, len(self._words), each)]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return SharedRows, (*self._shape, self._source)

    @property
    def on(self) -> bool:
        return self._words[_ON] != 0

    @on.setter
    def on(self, value: bool) -> None:
        self._words[_ON] = int(value)

    @property
    def threads(self) -> int:
        """How many threads an operator in a worker uses at most; 0 if no worker has reported it yet."""
        return self._words[_THREADS]

    def add_threads(self, count: int) -> None:
        """Called by each worker, for itself."""
        self._words[_THREADS] = max(count, self._words[_THREADS])


class _Unnamed:
    """Memory that has only a file descriptor (Linux)."""

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
    """New shared memory: on Linux `_Unnamed`, elsewhere a tensor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("gpulab-loading")
        os.ftruncate(descriptor, size_bytes)
        return _Unnamed(descriptor, size_bytes)
    import torch

    return torch.zeros(size_bytes, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]


def batches_of(tables: list[Int64], origin_ns: int, now_ns: int, most: int) -> tuple[Batches | None, int]:
    """The newest `most` rows of `BATCH` in order of arrival, on a clock that starts at `origin_ns`, and the excess.

    None if nothing was timed.
    """
    rows = np.concatenate(tables) if tables else np.empty((0, len(BATCH)), np.int64)
    column: dict[str, Int64] = dict(zip(BATCH, rows.T, strict=True))
    sound = (column["start_ns"] <= column["end_ns"]) & (column["end_ns"] <= now_ns + _CLOCKS_APART_NS)
    sound &= (column["start_ns"] >= origin_ns) & (column["item_count"] >= 0)
    arrived = np.where(column["answered_ns"] < 0, column["end_ns"], column["answered_ns"])
    order = np.flatnonzero(sound)[np.argsort(arrived[sound], kind="stable")]
    if not len(order):
        return None, 0
    column = {name: np.ascontiguousarray(values[order[-most:]]) for name, values in column.items()}
    for name in _TIMES:
        column[name] = np.where(column[name] < 0, -1, column[name] - origin_ns)
    _share_out(column)
    worker = column.pop("worker").astype(np.int32)
    return Batches(worker=worker, **column), max(0, len(order) - most)


def _share_out(column: dict[str, Int64]) -> None:
    """Split the reading time of batches with untimed transforms as in the worker's previous batch with timed ones."""
    for worker in np.unique(column["worker"]).tolist():
        mine = np.flatnonzero(column["worker"] == worker)
        is_timed = column["transform_ns"][mine] >= 0
        timed, untimed = mine[is_timed], mine[~is_timed]
        at = timed[np.maximum(np.searchsorted(timed, untimed) - 1, 0)] if len(timed) else None
        for rest, part in (("read_ns", "transform_ns"), ("read_cpu_ns", "transform_cpu_ns")):
            both = column[rest][untimed]
            share = column[part][at] / np.maximum(column[part][at] + column[rest][at], 1) if at is not None else 0.0
            column[part][untimed] = (share * both).astype(np.int64)
            column[rest][untimed] = both - column[part][untimed]
        cpu = column["read_cpu_ns"][untimed] + column["transform_cpu_ns"][untimed]  # each at most its wall time
        least, most = np.maximum(cpu - column["read_ns"][untimed], 0), column["transform_ns"][untimed]
        column["transform_cpu_ns"][untimed] = np.clip(column["transform_cpu_ns"][untimed], least, most)
        column["read_cpu_ns"][untimed] = cpu - column["transform_cpu_ns"][untimed]
