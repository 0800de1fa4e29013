"""Has the batches of a run timed where they are made, and joins that with when the training loop had them.

For the length of a run methods of torch's iterators are wrapped (`hooks.LOADING`), at the class, so that copies of
loaders, which knobs make, are heard too. A loader has another `worker_init_fn` while its workers start, and its own
again after that. Batches are told apart by the worker that made them: torch gives out those of one worker in the order
in which it made them.
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
    Pace,
    WorkerStart,
    sample_loading,
    sampling_key,
)
from gpulab.capture.hooks import LOADING, wrap
from gpulab.capture.loading_rows import ANSWER, BATCH, OF_WORKER, Rows, SharedRows, batches_of
from gpulab.capture.stack_sampler import Channel, SamplingProcess, ThreadSamples
from gpulab.run import Batches, Choice, Int64, Missing

WHAT = "what takes the time inside the DataLoader"
KEPT = 20_000  # batches: the newest
_PINNED_MOST = 1024  # batches that are pinned and were not asked for yet
_NAME_HERE = "training process"


class WorkerBatches:
    """What was timed of one iterator with workers. Their memory is kept as long as they may write to it.

    `loader` is its number, as the hooks count; `threads` the most that an operator in a worker is split among.
    """

    def __init__(self, loader: Any, first: int, channel: Channel | None, name: str) -> None:
        """For the iterator that is about to be made; each worker times its `first` batches, then fewer."""
        self.workers: int = loader.num_workers
        most = max(1, KEPT // self.workers)
        self._memory: SharedRows | None = SharedRows(self.workers, len(OF_WORKER), most)
        self._first, self._channel, self.name = first, channel, name
        self._iterator: Callable[[], Any] = _nothing
        self.loader: int | None = None
        self.threads: int | None = None
        self.answers = [Rows.here(len(ANSWER), most) for _ in range(self.workers)]
        self._epoch_begin = [0] * self.workers  # answers before this epoch
        self._read = [0] * self.workers
        self._newest = [(-1, -1)] * self.workers  # epoch and number of the last batch that was timed
        self._tables: list[Int64] = []
        self._lost = 0
        self.worker, self.pin_ns = -1, 0  # of the batch that the loop has asked for; -1: it was not handed over yet

    @contextmanager
    def starting(self, iterator: Any, loader: Any) -> Iterator[None]:
        """Inside, torch makes the iterator and starts its workers."""
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
            self._epoch_begin = [answers.count for answers in self.answers]
            self._memory.on = True

    def stop(self) -> None:
        if self._memory is not None:
            self._memory.on = False

    def close_if_over(self) -> None:
        """Give the memory back where the workers are gone."""
        iterator = self._iterator()
        if self._memory is not None and (iterator is None or getattr(iterator, "_shutdown", False)):
            self._collect()
            self._memory, self.answers = None, []

    def take(self) -> tuple[list[Int64], int]:
        """Rows of `BATCH` since the last time, and how many are lost."""
        if self._memory is not None:
            self._collect()
        taken, self._tables, self._lost = (self._tables, self._lost), [], 0
        return taken

    def _collect(self) -> None:
        """Join what the workers have written with when the loop had it."""
        assert self._memory is not None
        self.threads = self._memory.threads or None
        for worker, written in enumerate(self._memory.of_worker):
            read, count = self._read[worker], written.count
            if count == read:
                continue
            rows, self._read[worker] = written.between(read, count), count
            lost = count - read - len(rows)
            epoch, number = rows[:, 0], rows[:, 1]
            answers = self.answers[worker].numbered(self._epoch_begin[worker] + number)
            answers[epoch != epoch[-1]] = -1  # who is late also makes batches of an earlier epoch
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
    """Of one run, on the thread that made it; the run began at `origin_ns` (`time.perf_counter_ns`)."""

    def __init__(self, origin_ns: int, stacks: SamplingProcess | None = None) -> None:
        self._origin_ns = origin_ns
        self._thread, self._process = get_ident(), os.getpid()
        self._stacks = stacks
        self._clocks: weakref.WeakKeyDictionary[Any, tuple[FetchClock, Rows]] = weakref.WeakKeyDictionary()
        self._here: dict[int | None, tuple[Pace, Rows]] = {}  # by loader: its epochs share them
        self._several: list[WorkerBatches] = []
        self._started: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders whose workers were started in this run
        self._untimed: set[int | None] = set()  # loaders whose workers were there before
        self._pinned: dict[int, int] = {}  # ns, by the id of what was pinned
        self._pinning = threading.local()
        self.asked: int | None = None  # the loader of that number is asked for a batch now
        self._newest_here: tuple[Callable[[], Any], Pace] = (_nothing, Pace())  # nearly always asked again
        self._newest: tuple[Callable[[], Any], WorkerBatches | None] = (_nothing, None)
        self.own_ns = 0  # what timing the batches took on this thread, since somebody has put it to 0
        self._fault: Exception | None = None
        self.worker_threads: int | None = None  # once finished: the most that an operator in a worker is split among

    def start(self, undo: ExitStack) -> None:
        """Hear everything until `undo`. Needs torch to be imported; one that has no such methods is not timed."""
        with ExitStack() as mine:
            try:
                mine.callback(self._rest)
                wrap(LOADING, self, mine)
            except Exception as e:
                self._fault = e
            else:
                undo.push(mine.pop_all())

    def finish(self, feeder: int | None) -> tuple[Batches | None, tuple[Missing, ...], tuple[Choice, ...]]:
        """After the run: what was timed of the loader that fed its steps, and what there is to say of it."""
        here, several = self._of(feeder)
        taken = [([rows.between(0, rows.count)], max(0, rows.count - rows.most)) for rows in here]
        taken += [batches.take() for batches in several]
        self.worker_threads = max((b.threads for b in several if b.threads is not None), default=None)
        tables = [table for tables, _ in taken for table in tables]
        batches, cut = batches_of(tables, self._origin_ns, perf_counter_ns(), KEPT)
        self._several.clear()
        self._newest = (_nothing, None)  # it holds the workers' memory
        left_out = cut + sum(lost for _, lost in taken)
        why = f"{left_out:,} before them are not kept"
        kept = Choice("batches timed inside the DataLoader", f"the last {KEPT:,}", why)
        return batches, self._missing(feeder, batches), (kept,) if left_out else ()

    def _of(self, feeder: int | None) -> tuple[list[Rows], list[WorkerBatches]]:
        """Of that loader; of all where nobody knows which fed the steps."""
        here = [rows for loader, (_, rows) in self._here.items() if feeder in (None, loader)]
        return here, [batches for batches in self._several if feeder in (None, batches.loader)]

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
        for batches in self._several:
            batches.stop()

    @property
    def _hears(self) -> bool:
        return self._fault is None and get_ident() == self._thread and os.getpid() == self._process

    def _tried(self, task: Callable[[], Any]) -> Any:
        """Its result; None where it fails: that is our affair, and ends the timing."""
        try:
            return task()
        except Exception as e:
            self._fault = e
            return None

    # -- iterators with workers ----------------------------------------------------------------------------------

    def wrap_init(self, original: Any) -> Any:
        @functools.wraps(original)
        def __init__(iterator: Any, loader: Any, *rest: Any, **named: Any) -> None:
            batches = self._tried(lambda: self._new_batches(loader)) if self._hears else None
            if batches is None:
                original(iterator, loader, *rest, **named)
                return
            with batches.starting(iterator, loader):
                original(iterator, loader, *rest, **named)
            self._several.append(batches)
            _begun[iterator] = batches

        return __init__

    def _new_batches(self, loader: Any) -> WorkerBatches | None:
        """None where its workers cannot be told."""
        for batches in self._several:
            batches.close_if_over()
        first = FIRST_AGAIN if loader in self._started else FIRST
        self._started.add(loader)
        name = f"loader {len(self._several)}"
        return WorkerBatches(loader, first, self._channel, name) if "worker_init_fn" in vars(loader) else None

    def wrap_reset(self, original: Any) -> Any:
        @functools.wraps(original)
        def _reset(iterator: Any, loader: Any, first_iter: bool = False, *rest: Any, **named: Any) -> Any:
            if self._hears and not first_iter:
                self._tried(lambda: self._begin_anew(iterator))
            return original(iterator, loader, first_iter, *rest, **named)

        return _reset

    def _begin_anew(self, iterator: Any) -> None:
        """Workers that an earlier run has timed are timed again from here on."""
        self._newest = (_nothing, None)
        batches = _begun.get(iterator)
        if batches is not None:
            if batches not in self._several:
                self._several.append(batches)
            batches.begin_anew()

    def wrap_next_of_workers(self, original: Any) -> Any:
        @functools.wraps(original)
        def _next_data(iterator: Any) -> Any:
            newest, batches = self._newest
            if newest() is not iterator:
                if not self._hears:
                    return original(iterator)
                batches = _begun.get(iterator)
                if batches not in self._several:
                    batches = None
                    self._untimed.add(self.asked)
                self._newest = weakref.ref(iterator), batches
            if batches is None:
                return original(iterator)
            batches.loader, batches.worker = self.asked, -1
            asked_ns = perf_counter_ns()
            try:
                return original(iterator)
            finally:
                if batches.worker >= 0:
                    batches.answers[batches.worker].append((asked_ns, perf_counter_ns(), batches.pin_ns))

        return _next_data

    def wrap_process(self, original: Any) -> Any:
        @functools.wraps(original)
        def _process_data(iterator: Any, data: Any, *rest: Any) -> Any:
            newest, batches = self._newest
            # a torch that does not say which worker made it: never known
            if batches is not None and rest and newest() is iterator:
                batches.worker, batches.pin_ns = rest[0], self._pin_ns(iterator, data)
            return original(iterator, data, *rest)

        return _process_data

    # -- iterators without workers -------------------------------------------------------------------------------

    def wrap_next_here(self, original: Any) -> Any:
        @functools.wraps(original)
        def _next_data(iterator: Any) -> Any:
            newest, pace = self._newest_here
            if pace.left and newest() is iterator:
                pace.left -= 1
                return original(iterator)
            entered_ns = perf_counter_ns()
            timing = self._tried(lambda: self._timing_here(iterator)) if self._hears else None
            if timing is None:
                return original(iterator)
            clock, rows = timing
            pace = clock.pace
            if pace.left:  # of an epoch before
                pace.left -= 1
                return original(iterator)
            clock.put_in()
            asked_ns = perf_counter_ns()
            try:
                data = original(iterator)
            finally:
                answered_ns = perf_counter_ns()
                clock.take_out()
            if clock.row is not None:
                rows.append((HERE, *clock.row, asked_ns, answered_ns, self._pin_ns(iterator, data), pace.distance))
            now_ns = perf_counter_ns()
            own_ns = asked_ns - entered_ns + clock.own_ns + now_ns - answered_ns
            self.own_ns += own_ns
            pace.timed(own_ns, now_ns)
            return data

        return _next_data

    def _timing_here(self, iterator: Any) -> tuple[FetchClock, Rows]:
        timing = self._clocks.get(iterator)
        if timing is None:
            for batches in self._several:
                batches.close_if_over()
            if not self._here:  # all loaders without workers share one: it looks at this thread
                sample_loading(self._channel, _NAME_HERE, HERE)
            if self.asked not in self._here:
                self._here[self.asked] = Pace(), Rows.here(len(BATCH), KEPT)
            pace, rows = self._here[self.asked]
            clock = FetchClock(iterator._dataset_fetcher, iterator._dataset, pace, ComputeThreads())
            timing = self._clocks[iterator] = clock, rows
        self._newest_here = weakref.ref(iterator), timing[0].pace
        return timing

    # -- looking at who makes them ---------------------------------------------------------------------------------

    @property
    def _channel(self) -> Channel | None:
        return self._stacks.channel if self._stacks is not None else None

    def samples(self, feeder: int | None) -> list[ThreadSamples]:
        """After the run: what was seen where the loader that fed its steps made its batches."""
        here, several = self._of(feeder)
        if self._stacks is None or self._channel is None:
            return []
        keys = [sampling_key(_NAME_HERE, HERE)] if here else []
        keys += [sampling_key(batches.name, worker) for batches in several for worker in range(batches.workers)]
        for key in keys:
            self._channel.stop(key)
        answers = [self._stacks.samples(key) for key in keys]
        return [samples for samples in answers if samples is not None]

    # -- pinning -------------------------------------------------------------------------------------------------

    def wrap_pin(self, original: Any) -> Any:
        """In whatever thread torch pins. It calls itself for what a batch consists of."""

        @functools.wraps(original)
        def pin_memory(data: Any, *rest: Any, **named: Any) -> Any:
            if getattr(self._pinning, "within", False):
                return original(data, *rest, **named)
            self._pinning.within = True
            start_ns = perf_counter_ns()
            try:
                pinned = original(data, *rest, **named)
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
    """No iterator was asked yet."""
