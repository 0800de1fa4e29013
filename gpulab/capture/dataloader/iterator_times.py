"""What was timed of one iterator of a DataLoader: rows of those who made its batches, and who had them when."""

from __future__ import annotations

import functools
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import numpy as np

from gpulab.capture.dataloader.fetch_clock import Pace, Row, TimedFetcher
from gpulab.capture.dataloader.shared_rows import SharedRows
from gpulab.capture.dataloader.worker import LoadingWatch, WorkerStart
from gpulab.run import Batches, Int64

KEPT = 20_000  # batches: the newest
COLUMNS = (  # of a row as it is kept
    "worker",
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
    "asked_ns",
    "answered_ns",
    "pin_ns",
    "stands_for",
)
_ROW = struct.Struct(f"{len(COLUMNS)}q")
_TIMES = ("start_ns", "end_ns", "asked_ns", "answered_ns")
_CLOCKS_APART_NS = 1_000_000

Answer = tuple[int, int, int]  # asked, answered, pinning
_NEVER: Answer = (-1, -1, -1)


class Timed:
    """Rows of `COLUMNS`, the newest `KEPT`, packed: as tuples they would take five times as much memory.

    `left_out` counts the others.
    """

    def __init__(self) -> None:
        self._kept: deque[bytes] = deque(maxlen=KEPT)
        self.left_out = 0

    def append(self, row: tuple[int, ...]) -> None:
        """The newest row."""
        self._add(_ROW.pack(*row))

    def add(self, other: Timed) -> None:
        """The rows of another, after those that are there."""
        for row in other._kept:
            self._add(row)
        self.left_out += other.left_out

    def _add(self, row: bytes) -> None:
        self.left_out += len(self._kept) == self._kept.maxlen
        self._kept.append(row)

    def batches(self, origin_ns: int, now_ns: int) -> Batches | None:
        """In order of arrival, on a clock that starts at `origin_ns`; None where nothing was timed."""
        rows = np.frombuffer(b"".join(self._kept), np.int64).reshape(-1, len(COLUMNS))
        column = {name: rows[:, i] for i, name in enumerate(COLUMNS)}
        sound = (column["start_ns"] <= column["end_ns"]) & (column["end_ns"] <= now_ns + _CLOCKS_APART_NS)
        sound &= (column["start_ns"] >= origin_ns) & (column["item_count"] >= 0)
        arrived = np.where(column["answered_ns"] < 0, column["end_ns"], column["answered_ns"])
        order = np.flatnonzero(sound)[np.argsort(arrived[sound], kind="stable")]
        if not len(order):
            return None
        kept: dict[str, Int64] = {name: values[order] for name, values in column.items()}
        for name in _TIMES:
            kept[name] = np.where(kept[name] < 0, -1, kept[name] - origin_ns)
        _share_out(kept)
        worker = kept.pop("worker").astype(np.int32)
        return Batches(worker=worker, **{name: np.ascontiguousarray(values) for name, values in kept.items()})


def _share_out(column: dict[str, Int64]) -> None:
    """Batches whose transforms were not timed: as the last of the same worker whose were."""
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
        cpu = column["read_cpu_ns"][untimed] + column["transform_cpu_ns"][untimed]  # of each part at most its wall time
        least, most = np.maximum(cpu - column["read_ns"][untimed], 0), column["transform_ns"][untimed]
        column["transform_cpu_ns"][untimed] = np.clip(column["transform_cpu_ns"][untimed], least, most)
        column["read_cpu_ns"][untimed] = cpu - column["transform_cpu_ns"][untimed]


class Here:
    """An iterator that makes its batches in the training process: who makes one hands it over.

    `loader` is its number, as the hooks count; `threads` the most that an operator in a worker is split among. The
    iterators of one loader share `timed` and `pace`.
    """

    def __init__(self, timed: Timed, pace: Pace) -> None:
        self.timed, self.pace = timed, pace
        self.loader: int | None = None
        self.threads: int | None = None
        self.fetcher: TimedFetcher | None = None
        self.own_ns = 0  # that timing the newest batch took
        self.looks: LoadingWatch | None = None
        self._on = True
        self._row: Row | None = None

    def begins(self) -> bool:
        self._row = None
        return self._on

    def add(self, row: Row) -> None:
        self._row = row

    def cost(self, own_ns: int) -> None:
        self.own_ns = own_ns

    def broken(self) -> None:
        self._on = False

    def asked(self) -> None:
        """The batch that is asked for now is timed."""
        self.own_ns, self._row = 0, None
        if self.fetcher is not None and self._on:
            self.fetcher.clock.follows = self.pace.distance == 1
            self.fetcher.put_in()

    def rest(self) -> None:
        """It is there, or there is none; those that follow it are not timed so far."""
        if self.fetcher is not None:
            self.fetcher.take_out()

    def answered(self, asked_ns: int, answered_ns: int, pin_ns: int) -> None:
        if self._row is not None:
            self.timed.append((-1, *self._row, asked_ns, answered_ns, pin_ns, self.pace.distance))

    def stop(self) -> None:
        self._on = False
        if self.fetcher is not None:
            self.fetcher.close()

    def close_if_over(self) -> None:
        """Its fetcher went with it."""

    def close(self) -> None:
        """Nothing was opened that has to be closed."""


class FromWorkers:
    """An iterator with workers. Its memory is kept as long as they may write to it."""

    def __init__(self, memory: SharedRows, first: int, looks: LoadingWatch | None = None) -> None:
        self.timed = Timed()
        self._first = first
        self.looks = looks
        self.loader: int | None = None
        self.threads: int | None = None
        self._memory: SharedRows | None = memory
        self._workers = memory.workers
        self._iterator: Callable[[], Any] = lambda: None
        self._read = [0] * self._workers
        self._newest = [(-1, -1)] * self._workers  # epoch and number of the last batch that was timed
        self._asked_ns = 0
        self._given: tuple[int, int] | None = None
        self.count = memory.workers
        self._forget_answers()

    @classmethod
    def of(cls, loader: Any, first: int, looks: LoadingWatch | None = None) -> FromWorkers | None:
        """For the iterator that is about to be made of a loader; None where its workers cannot be told.

        Each worker times its `first` batches, then fewer.
        """
        if "worker_init_fn" not in vars(loader):
            return None
        return cls(SharedRows(loader.num_workers, max(1, KEPT // loader.num_workers)), first, looks)

    @contextmanager
    def starting(self, iterator: Any, loader: Any) -> Iterator[None]:
        """Inside, torch makes the iterator and starts its workers."""
        assert self._memory is not None
        users = loader.worker_init_fn
        ours = WorkerStart(users, self._memory, self._first, self.looks)
        self._memory.on = True
        self._iterator = weakref.ref(iterator)
        vars(loader)["worker_init_fn"] = ours
        try:
            yield
        finally:
            if vars(loader).get("worker_init_fn") is ours:
                vars(loader)["worker_init_fn"] = users
            # of the iterator, too, which has noted with what its workers began
            noted = vars(iterator).get("_worker_init_fn")
            if noted is ours:
                iterator._worker_init_fn = users
            elif isinstance(noted, functools.partial) and noted.args[:1] == (ours,):  # torch's own, of a data pipe
                iterator._worker_init_fn = functools.partial(noted.func, users, *noted.args[1:], **noted.keywords)

    def begin_anew(self) -> None:
        """The workers are told to begin anew, after what they are making."""
        if self._memory is not None:
            self._collect()
            self._forget_answers()
            self._memory.on = True

    def asked(self, loader: int | None) -> None:
        """The loop waits from here on."""
        self.loader = loader
        self._asked_ns, self._given = perf_counter_ns(), None

    def given(self, worker: int, pin_ns: int) -> None:
        """It gets the next batch that this worker has made."""
        self._given = worker, pin_ns

    def answered(self) -> None:
        if self._given is not None:
            worker, pin_ns = self._given
            self._answers[worker].append((self._asked_ns, perf_counter_ns(), pin_ns))
            self._answer_count[worker] += 1

    def stop(self) -> None:
        if self._memory is not None:
            self._memory.on = False

    def close_if_over(self) -> None:
        """Give the memory back where the workers are gone."""
        iterator = self._iterator()
        if self._memory is not None and (iterator is None or getattr(iterator, "_shutdown", False)):
            self.close()
            self._memory = None

    def close(self) -> None:
        if self._memory is not None:
            self._collect()

    def _forget_answers(self) -> None:
        self._answers = [deque[Answer](maxlen=max(1, KEPT // self._workers)) for _ in range(self._workers)]
        self._answer_count = [0] * self._workers

    def _collect(self) -> None:
        assert self._memory is not None
        rows = self._memory.rows
        self.threads = self._memory.threads or None
        for worker in range(self._workers):
            written = self._memory.written(worker)
            first = max(self._read[worker], written - rows)
            self.timed.left_out += first - self._read[worker]
            written_rows = self._memory.read(worker, first, written)
            newest = written_rows[-1][0] if written_rows else 0  # who is late also makes batches of an earlier epoch
            before = self._newest[worker] if first == self._read[worker] else None
            for epoch, number, *row in written_rows:
                answer = self._answer(worker, number) if epoch == newest else _NEVER
                passed_by = 0 if before is None else number - (before[1] if before[0] == epoch else -1) - 1
                self.timed.append((worker, *row, *answer, 1 + passed_by))
                before = self._newest[worker] = epoch, number
            self._read[worker] = written

    def _answer(self, worker: int, number: int) -> Answer:
        """When the loop had the batch of that number."""
        answers = self._answers[worker]
        at = number - (self._answer_count[worker] - len(answers))
        return answers[at] if 0 <= at < len(answers) else _NEVER


Feed = Here | FromWorkers
