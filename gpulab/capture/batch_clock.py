"""Times the batches of a run where they are made, and adds the times at which the training loop got them.

During a run methods of torch's iterators are wrapped (`torch_hooks.LOADING`), at the class, so that copies of loaders
that knobs make are timed too. While a loader's workers start, its `worker_init_fn` is replaced. A batch is identified
by its worker and a number: torch returns the batches of one worker in the order in which they were made.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import numpy as np

from gpulab.capture.fetch_clock import (
    FIRST,
    FIRST_AGAIN,
    HERE,
    ComputeThreads,
    FetchClock,
    FetchPace,
    WorkerStart,
    sample_loading,
    sampling_key,
)
from gpulab.capture.loading_rows import ANSWER, BATCH, OF_WORKER, Rows, SharedRows, batches_of
from gpulab.capture.stack_sampler import Channel, SamplingProcess, ThreadSamples
from gpulab.capture.torch_hooks import LOADING, wrap
from gpulab.run import Batches, Choice, Int64, Missing

WHAT = "what takes the time inside the DataLoader"
MOST_BATCHES = 20_000  # the newest are kept
_PINNED_MOST = 1024  # batches that are pinned and not yet requested
_NAME_HERE = "training process"


class WorkerBatches:
    """The timed batches of one iterator with workers. Holds their shared memory while they may write to it.

    `loader` is the loader's number; `threads` is how many threads an operator in a worker uses at most.
    """

    def __init__(self, loader: Any, first: int, channel: Channel | None, name: str) -> None:
        """Create it before the iterator; each worker times its `first` batches, then fewer."""
        self.workers: int = loader.num_workers
        most = max(1, MOST_BATCHES // self.workers)
        self._memory: SharedRows | None = SharedRows(self.workers, len(OF_WORKER), most)
        self._first, self._channel, self.name = first, channel, name
        self._iterator: Callable[[], Any] = _nothing
        self.loader: int | None = None
        self.threads: int | None = None
        self.answers = [Rows.here(len(ANSWER), most) for _ in range(self.workers)]
        self._epoch_begin = [0] * self.workers  # by worker: number of answers before this epoch
        self._read = [0] * self.workers
        self._newest = [(-1, -1)] * self.workers  # epoch and number of the last batch that was timed
        self._tables: list[Int64] = []
        self._lost = 0
        self.worker, self.pin_ns = -1, 0  # of the batch that the loop requests; -1: it has not arrived yet

    @contextmanager
    def starting(self, iterator: Any, loader: Any) -> Iterator[None]:
        """Inside the block torch makes the iterator and starts its workers."""
        assert self._memory is not None
        users = loader.worker_init_fn
        ours = WorkerStart(users, self._memory, self._first, self._channel, self.name)
        self._memory.on = True
        self._iterator = weakref.ref(iterator)
        vars(loader)["worker_init_fn"] = ours
        try:
            yield
        finally:
            if vars(loader).get("worker_init_fn") is ours:
                vars(loader)["worker_init_fn"] = users
            # the iterator has stored the function with which its workers started
            init_fn = vars(iterator).get("_worker_init_fn")
            if init_fn is ours:
                iterator._worker_init_fn = users
            elif isinstance(init_fn, functools.partial) and init_fn.args[:1] == (ours,):  # torch's, for data pipes
                iterator._worker_init_fn = functools.partial(init_fn.func, users, *init_fn.args[1:], **init_fn.keywords)

    def begin_anew(self) -> None:
        """The workers will begin a new epoch after their current batches."""
        if self._memory is not None:
            self._collect()
            self._epoch_begin = [answers.count for answers in self.answers]
            self._memory.on = True

    def stop(self) -> None:
        if self._memory is not None:
            self._memory.on = False

    def close_if_over(self) -> None:
        """Release the memory if the workers have ended."""
        iterator = self._iterator()
        if self._memory is not None and (iterator is None or getattr(iterator, "_shutdown", False)):
            self._collect()
            self._memory, self.answers = None, []

    def take(self) -> tuple[list[Int64], int]:
        """Rows of `BATCH` since the last call, and how many were lost."""
        if self._memory is not None:
            self._collect()
        pairs, self._tables, self._lost = (self._tables, self._lost), [], 0
        return pairs

    def _collect(self) -> None:
        """Join the workers' rows with the times at which the loop got the batches."""
        assert self._memory is not None
        self.threads = self._memory.threads or None
        for worker, rows_of_worker in enumerate(self._memory.of_worker):
            read, count = self._read[worker], rows_of_worker.count
            if count == read:
                continue
            rows, self._read[worker] = rows_of_worker.between(read, count), count
            lost = count - read - len(rows)
            epoch, number = rows[:, 0], rows[:, 1]
            answers = self.answers[worker].numbered(self._epoch_begin[worker] + number)
            answers[epoch != epoch[-1]] = -1  # a late worker may still make batches of an earlier epoch
            before = np.vstack((self._newest[worker], rows[:-1, :2]))
            stands_for = number - np.where(before[:, 0] == epoch, before[:, 1], -1)
            if lost:
                stands_for[0] = 1
            self._newest[worker] = int(epoch[-1]), int(number[-1])
            self._tables.append(np.column_stack((np.full(len(rows), worker), rows[:, 2:], answers, stands_for)))
            self._lost += lost


# by iterator: its workers may outlive the run
_begun: weakref.WeakKeyDictionary[Any, WorkerBatches] = weakref.WeakKeyDictionary()


class LoadingClock:
    """Times the batches of one run, which began at `origin_ns` (`time.perf_counter_ns`), on the thread that made it."""

    def __init__(self, origin_ns: int, stacks: SamplingProcess | None = None) -> None:
        self._origin_ns = origin_ns
        self._thread, self._process = get_ident(), os.getpid()
        self._stacks = stacks
        self._clocks: weakref.WeakKeyDictionary[Any, tuple[FetchClock, Rows]] = weakref.WeakKeyDictionary()
        self._here: dict[int | None, tuple[FetchPace, Rows]] = {}  # by loader: shared by its epochs
        self._iterators: list[WorkerBatches] = []
        self._started: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders whose workers were started in this run
        self._untimed: set[int | None] = set()  # loaders whose workers are older than the run
        self._pinned: dict[int, int] = {}  # ns, by the id of the pinned batch
        self._pinning = threading.local()
        self.loader: int | None = None  # number of the loader with the current request
        self._newest_here: tuple[Callable[[], Any], FetchPace] = (_nothing, FetchPace())  # usually the next one too
        self._newest: tuple[Callable[[], Any], WorkerBatches | None] = (_nothing, None)
        self.own_ns = 0  # the cost of timing on this thread since `Arguments.samples` last reset it
        self._fault: Exception | None = None
        self.worker_threads: int | None = None  # after `finish`: how many threads an operator in a worker uses at most

    def start(self, undo: ExitStack) -> None:
        """Wrap torch's methods until `undo`. Needs torch to be imported; a torch without such methods is not timed."""
        with ExitStack() as mine:
            try:
                mine.callback(self._rest)
                wrap(LOADING, self, mine)
            except Exception as e:
                self._fault = e
            else:
                undo.push(mine.pop_all())

    def finish(self, feeder: int | None) -> tuple[Batches | None, tuple[Missing, ...], tuple[Choice, ...]]:
        """After the run: the timed batches of the loader that fed its steps, what is missing, and what was left out."""
        here, iterators = self._of(feeder)
        pairs = [([rows.between(0, rows.count)], max(0, rows.count - rows.most)) for rows in here]
        pairs += [batches.take() for batches in iterators]
        self.worker_threads = max((b.threads for b in iterators if b.threads is not None), default=None)
        tables = [table for tables, _ in pairs for table in tables]
        batches, cut = batches_of(tables, self._origin_ns, perf_counter_ns(), MOST_BATCHES)
        self._iterators.clear()
        self._newest = (_nothing, None)  # it holds the workers' memory
        excess = cut + sum(lost for _, lost in pairs)
        why = f"{excess:,} before them are not kept"
        limit = Choice("batches timed inside the DataLoader", f"the last {MOST_BATCHES:,}", why)
        return batches, self._missing(feeder, batches), (limit,) if excess else ()

    def _of(self, feeder: int | None) -> tuple[list[Rows], list[WorkerBatches]]:
        """The rows of that loader; of all loaders if it is unknown which one fed the steps."""
        here = [rows for loader, (_, rows) in self._here.items() if feeder in (None, loader)]
        return here, [batches for batches in self._iterators if feeder in (None, batches.loader)]

    def _missing(self, feeder: int | None, batches: Batches | None) -> tuple[Missing, ...]:
        if self._fault is not None:
            why = f"gpulab failed while timing ({type(self._fault).__name__}: {self._fault})"
        elif self._untimed & {feeder, None} or (feeder is None and self._untimed):
            why = (
                "its workers were started before this run; build the DataLoader in the profiled code, "
                "or run without persistent_workers"
            )
        elif batches is None and feeder is not None:
            why = "it builds its batches in its own way, which gpulab cannot time"
        else:
            return ()
        return (Missing(WHAT, why, key="workers_inside"),)

    def _rest(self) -> None:
        for clock, _ in self._clocks.values():
            clock.close()
        for batches in self._iterators:
            batches.stop()

    @property
    def _is_active(self) -> bool:
        return self._fault is None and get_ident() == self._thread and os.getpid() == self._process

    def _attempt(self, task: Callable[[], Any]) -> Any:
        """The result of `task`; None if it fails, which ends the timing but not the user's code."""
        try:
            return task()
        except Exception as e:
            self._fault = e
            return None

    # -- iterators with workers ----------------------------------------------------------------------------------

    def wrap_init(self, original: Any) -> Any:
        @functools.wraps(original)
        def __init__(iterator: Any, loader: Any, *rest: Any, **kwargs: Any) -> None:
            batches = self._attempt(lambda: self._new_batches(loader)) if self._is_active else None
            if batches is None:
                original(iterator, loader, *rest, **kwargs)
                return
            with batches.starting(iterator, loader):
                original(iterator, loader, *rest, **kwargs)
            self._iterators.append(batches)
            _begun[iterator] = batches

        return __init__

    def _new_batches(self, loader: Any) -> WorkerBatches | None:
        """None if its workers cannot be instrumented."""
        for batches in self._iterators:
            batches.close_if_over()
        first = FIRST_AGAIN if loader in self._started else FIRST
        self._started.add(loader)
        name = f"loader {len(self._iterators)}"
        return WorkerBatches(loader, first, self._channel, name) if "worker_init_fn" in vars(loader) else None

    def wrap_reset(self, original: Any) -> Any:
        @functools.wraps(original)
        def _reset(iterator: Any, loader: Any, first_iter: bool = False, *rest: Any, **kwargs: Any) -> Any:
            if self._is_active and not first_iter:
                self._attempt(lambda: self._begin_anew(iterator))
            return original(iterator, loader, first_iter, *rest, **kwargs)

        return _reset

    def _begin_anew(self, iterator: Any) -> None:
        """Time workers again that an earlier run has instrumented."""
        self._newest = (_nothing, None)
        batches = _begun.get(iterator)
        if batches is not None:
            if batches not in self._iterators:
                self._iterators.append(batches)
            batches.begin_anew()

    def wrap_next_of_workers(self, original: Any) -> Any:
        @functools.wraps(original)
        def _next_data(iterator: Any) -> Any:
            newest, batches = self._newest
            if newest() is not iterator:
                if not self._is_active:
                    return original(iterator)
                batches = _begun.get(iterator)
                if batches not in self._iterators:
                    batches = None
                    self._untimed.add(self.loader)
                self._newest = weakref.ref(iterator), batches
            if batches is None:
                return original(iterator)
            batches.loader, batches.worker = self.loader, -1
            request_ns = perf_counter_ns()
            try:
                return original(iterator)
            finally:
                if batches.worker >= 0:
                    batches.answers[batches.worker].append((request_ns, perf_counter_ns(), batches.pin_ns))

        return _next_data

    def wrap_process(self, original: Any) -> Any:
        @functools.wraps(original)
        def _process_data(iterator: Any, data: Any, *rest: Any) -> Any:
            newest, batches = self._newest
            # torch versions that do not pass the worker's number are not timed
            if batches is not None and rest and newest() is iterator:
                batches.worker, batches.pin_ns = rest[0], self._pin_ns(iterator, data)
            return original(iterator, data, *rest)

        return _process_data

    # -- iterators without workers -------------------------------------------------------------------------------

    def wrap_next_here(self, original: Any) -> Any:
        @functools.wraps(original)
        def _next_data(iterator: Any) -> Any:
            newest, pace = self._newest_here
            if pace.skip and newest() is iterator:
                pace.skip -= 1
                return original(iterator)
            entered_ns = perf_counter_ns()
            timing = self._attempt(lambda: self._timing_here(iterator)) if self._is_active else None
            if timing is None:
                return original(iterator)
            clock, rows = timing
            pace = clock.pace
            if pace.skip:  # left over from an earlier epoch
                pace.skip -= 1
                return original(iterator)
            clock.put_in()
            request_ns = perf_counter_ns()
            try:
                data = original(iterator)
            finally:
                answered_ns = perf_counter_ns()
                clock.take_out()
            if clock.row is not None:
                rows.append((HERE, *clock.row, request_ns, answered_ns, self._pin_ns(iterator, data), pace.distance))
            now_ns = perf_counter_ns()
            own_ns = request_ns - entered_ns + clock.own_ns + now_ns - answered_ns
            self.own_ns += own_ns
            pace.add(own_ns, now_ns)
            return data

        return _next_data

    def _timing_here(self, iterator: Any) -> tuple[FetchClock, Rows]:
        timing = self._clocks.get(iterator)
        if timing is None:
            for batches in self._iterators:
                batches.close_if_over()
            if not self._here:  # one stack sampler for all loaders without workers, as all use this thread
                sample_loading(self._channel, _NAME_HERE, HERE)
            if self.loader not in self._here:
                self._here[self.loader] = FetchPace(), Rows.here(len(BATCH), MOST_BATCHES)
            pace, rows = self._here[self.loader]
            clock = FetchClock(iterator._dataset_fetcher, iterator._dataset, pace, ComputeThreads())
            timing = self._clocks[iterator] = clock, rows
        self._newest_here = weakref.ref(iterator), timing[0].pace
        return timing

    # -- stack samples of loading ----------------------------------------------------------------------------------

    @property
    def _channel(self) -> Channel | None:
        return self._stacks.channel if self._stacks is not None else None

    def samples(self, feeder: int | None) -> list[ThreadSamples]:
        """After the run: stack samples of the threads that made the batches of the loader that fed its steps."""
        here, iterators = self._of(feeder)
        if self._stacks is None or self._channel is None:
            return []
        keys = [sampling_key(_NAME_HERE, HERE)] if here else []
        keys += [sampling_key(batches.name, worker) for batches in iterators for worker in range(batches.workers)]
        for key in keys:
            self._channel.stop(key)
        answers = [self._stacks.samples(key) for key in keys]
        return [samples for samples in answers if samples is not None]

    # -- pinning -------------------------------------------------------------------------------------------------

    def wrap_pin(self, original: Any) -> Any:
        """Wrap `pin_memory`, on whatever thread torch pins. The method calls itself for the parts of a batch."""

        @functools.wraps(original)
        def pin_memory(data: Any, *rest: Any, **kwargs: Any) -> Any:
            if getattr(self._pinning, "within", False):
                return original(data, *rest, **kwargs)
            self._pinning.within = True
            start_ns = perf_counter_ns()
            try:
                pinned = original(data, *rest, **kwargs)
            finally:
                self._pinning.within = False
            if len(self._pinned) >= _PINNED_MOST:
                self._pinned.clear()
            self._pinned[id(pinned)] = perf_counter_ns() - start_ns
            return pinned

        return pin_memory

    def _pin_ns(self, iterator: Any, data: Any) -> int:
        return self._pinned.pop(id(data), -1) if getattr(iterator, "_pin_memory", False) else 0


def _nothing() -> None:
    """Takes the place of a weak reference before the first request."""
