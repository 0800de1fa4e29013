"""Times how a batch is made, in the process that makes it: reading, the dataset's transforms, collating.

torch's fetcher takes items from the dataset and passes them to `collate_fn`. Both calls are wrapped at the fetcher, so
that the dataset stays the user's own object. During a fetch its transforms are replaced by stand-ins that pass
everything through. An error in gpulab ends the timing, never the batch.

Timing a batch takes as long as a short batch, so `FetchPace` limits how many are timed. CPU time is that of the whole
process, because a dataset may use its own threads, minus that of the training's threads (`ComputeThreads`), and at
most the wall time. If items are short, only every fourth batch gets stand-ins.

Spawned workers import this module, so it needs no more than torch, which they have anyway.
"""

from __future__ import annotations

import itertools
import linecache
import operator
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from random import Random
from threading import get_ident
from time import perf_counter_ns, process_time_ns
from typing import Any

from gpulab.capture.loading_rows import SharedRows
from gpulab.capture.stack_reader import Spot
from gpulab.capture.stack_sampler import Channel
from gpulab.devices.core_clock import CoreWait, voluntary_switches
from gpulab.user_code import hide_gpulabs_frames

TRANSFORMS = ("transform", "transforms", "target_transform")
_INNER = ("dataset", "datasets")  # of a Subset, a ConcatDataset
_HOLDERS = 16
_EVERY = 4
_SHORT_NS = 2_000_000  # per item
STAND_IN_NS = 2_000  # one call of a stand-in, measured
FIRST, FIRST_AGAIN = 64, 8  # batches that are all timed: of a loader, and of workers restarted for another epoch
BUDGET = 0.003  # share of the time, at most, for timing later batches
DISTURBANCE = 2.0  # measured: timing also slows the torch operators that follow, by as much time as it takes
_MEMORY = 16  # batches over which means and medians run

Row = tuple[int, ...]  # of `loading_rows.FETCH`


class FetchPace:
    """Decides which batches of a loader are timed: the first ones, then as many as the budget allows.

    The later ones are at random distances, so that periodic events, such as a file opened for every tenth batch, keep
    their share.
    """

    def __init__(self, first: int = FIRST) -> None:
        self._first = first
        self.skip = 0  # untimed batches before the next timed one
        self.distance = 1  # from the last timed batch to the next: the number of batches its row represents
        self._random = Random(0)  # its own, so that the user's random numbers stay the same
        self._timed = 0
        self._last_ns = 0
        self._costs_ns = deque[int](maxlen=_MEMORY)
        self._between_ns = 0.0  # from one batch to the next, on average

    def add(self, own_ns: int, now_ns: int) -> None:
        """A batch was timed; the timing itself took `own_ns`."""
        self._timed += 1
        between_ns = (now_ns - self._last_ns) / self.distance if self._timed > 1 else 0.0
        self._costs_ns.append(own_ns)
        self._between_ns += (between_ns - self._between_ns) / min(max(self._timed - 1, 1), _MEMORY)
        self._last_ns = now_ns
        if self._timed >= self._first:
            cost_ns = DISTURBANCE * sorted(self._costs_ns)[len(self._costs_ns) // 2]  # robust on a busy machine
            mean = cost_ns / max(BUDGET * self._between_ns, 1.0)
            self.distance = self._random.randint(1, max(1, round(2 * mean) - 1))
            self.skip = self.distance - 1


class FetchClock:
    """Times each batch that a fetcher of torch makes from a dataset, between `put_in` and `take_out`.

    `row` is that of the newest batch, None if it was not timed; `own_ns` is the cost of timing it. `training`: the
    threads whose CPU time does not belong to the batch.
    """

    def __init__(self, fetcher: Any, dataset: Any, pace: FetchPace, training: ComputeThreads | None = None) -> None:
        self.pace = pace
        self.row: Row | None = None
        self.own_ns = 0
        self.works = True  # no fault so far
        # weak: a cycle would keep the fetcher, and the user's iterator, alive
        self._fetcher = weakref.ref(fetcher)
        self._take, self._users = type(fetcher).fetch, fetcher.collate_fn
        self._batched = bool(getattr(fetcher, "auto_collation", True))
        self._holders = _holders(dataset)
        self._stand_ins: list[tuple[dict[str, Any], str, _StandIn]] = []  # those in place now
        self._cores = CoreWait()
        self._training = training
        self._spent = _Spent()
        self._untimed = 0  # consecutive batches whose transforms were not timed
        self._short = False

    def put_in(self) -> None:
        fetcher = self._fetcher()
        self.row, self.own_ns = None, 0
        if fetcher is not None and self.works:
            fetcher.fetch, fetcher.collate_fn = self.fetch, self._collate

    def take_out(self) -> None:
        attributes = vars(self._fetcher() or self)
        if getattr(attributes.get("fetch"), "__self__", None) is self:
            del attributes["fetch"]
        if getattr(attributes.get("collate_fn"), "__self__", None) is self:
            attributes["collate_fn"] = self._users

    def close(self) -> None:
        self.works = False
        self.take_out()
        self._cores.close()

    def fetch(self, index: Any) -> Any:
        entered_ns = perf_counter_ns()
        try:
            self._begin()
        except Exception:
            self._give_up()
            return self._take(self._fetcher(), index)
        try:
            batch = self._take(self._fetcher(), index)
        finally:
            self._end()
        try:
            self._keep(self._new_row(), entered_ns)
        except Exception:
            self._give_up()
        return batch

    def _keep(self, row: Row, entered_ns: int) -> None:
        """Store the row of a fetch that began at `entered_ns`."""
        self.row = row
        beside_ns = perf_counter_ns() - entered_ns - (self._end_ns - self._start_ns)
        self.own_ns = max(0, beside_ns) + STAND_IN_NS * self._spent.calls

    def _give_up(self) -> None:
        """End the timing after an error in gpulab."""
        self.works = False
        self._take_stand_ins_out()

    def _begin(self) -> None:
        self._collate_ns = self._collate_cpu_ns = -1
        self._items = 1
        spent = self._spent
        spent.within, spent.wall_ns, spent.cpu_ns, spent.calls = False, 0, 0, 0
        self._times_transforms = not self._short or self._untimed == _EVERY - 1
        if self._times_transforms:
            self._untimed = 0
            for attributes in self._holders:
                for name in TRANSFORMS:
                    users = attributes.get(name)
                    if users is not None and type(users) is not _StandIn and callable(users):
                        attributes[name] = stand_in = _StandIn(users, spent)
                        self._stand_ins.append((attributes, name, stand_in))
        else:
            self._untimed += 1
        spent.thread = get_ident()
        if self._training is not None:
            self._training.begin(follows=self.pace.distance == 1)
        self._core_ns, self._switches = self._cores.read(), voluntary_switches()
        self._cpu_ns = process_time_ns()
        self._start_ns = perf_counter_ns()

    def _collate(self, data: Any) -> Any:
        if self._spent.thread:
            self._collate_ns, self._collate_cpu_ns = perf_counter_ns(), process_time_ns()
            if self._batched:
                try:
                    self._items = len(data)
                except Exception:  # a user's dataset may return anything
                    self._items = 1
        return self._users(data)

    def _end(self) -> None:
        self._end_ns, self._end_cpu_ns = perf_counter_ns(), process_time_ns()
        self._spent.thread = 0
        # CPU time that the training's threads used meanwhile
        self._foreign_ns = self._training.end() if self._training is not None else 0
        self._take_stand_ins_out()
        self._short = self._end_ns - self._start_ns < _SHORT_NS * self._items

    def _take_stand_ins_out(self) -> None:
        """Restore the user's transforms, unless the user's code has replaced them meanwhile."""
        for attributes, name, stand_in in self._stand_ins:
            if attributes.get(name) is stand_in:
                attributes[name] = stand_in._gpulab_users
        self._stand_ins.clear()

    def _new_row(self) -> Row:
        spent, start_ns, end_ns, end_cpu_ns = self._spent, self._start_ns, self._end_ns, self._end_cpu_ns
        middle, middle_cpu = self._collate_ns, self._collate_cpu_ns
        if middle < 0:
            middle, middle_cpu = end_ns, end_cpu_ns
        read_ns = middle - start_ns - spent.wall_ns
        if read_ns < 0:
            read_ns = 0
        collate_ns, wall_ns = end_ns - middle, end_ns - start_ns
        transform_ns = spent.wall_ns if self._times_transforms else -1
        transform_cpu_ns = spent.cpu_ns if self._times_transforms else -1
        read_cpu_ns, collate_cpu_ns = middle_cpu - self._cpu_ns - spent.cpu_ns, end_cpu_ns - middle_cpu
        cpu_ns = end_cpu_ns - self._cpu_ns
        if self._foreign_ns or read_cpu_ns < 0:
            read_cpu_ns, collate_cpu_ns = self._own(read_cpu_ns, read_ns), self._own(collate_cpu_ns, collate_ns)
            transform_cpu_ns = self._own(transform_cpu_ns, transform_ns) if self._times_transforms else -1
            cpu_ns = self._own(cpu_ns, wall_ns)
        return (  # CPU time of each part: at most its wall time
            start_ns,
            end_ns,
            read_ns,
            transform_ns,
            collate_ns,
            read_cpu_ns if read_cpu_ns < read_ns else read_ns,
            transform_cpu_ns if transform_cpu_ns < transform_ns else transform_ns,
            collate_cpu_ns if collate_cpu_ns < collate_ns else collate_ns,
            self._items,
            self._core_wait_ns(wall_ns - cpu_ns if cpu_ns < wall_ns else 0),
        )

    def _own(self, cpu_ns: int, wall_ns: int) -> int:
        """The CPU time of a part of the batch, without its share of the time that the training's threads used."""
        whole_ns = max(1, self._end_ns - self._start_ns)
        return min(max(0, cpu_ns - self._foreign_ns * wall_ns // whole_ns), wall_ns)

    def _core_wait_ns(self, idle_ns: int) -> int:
        """How much of the time without CPU was waiting for a core: all if the thread never slept, -1 if unknown."""
        if idle_ns <= 0 <= self._core_ns:
            return 0
        if self._switches >= 0 and voluntary_switches() == self._switches:
            return idle_ns
        core_ns = self._cores.read()
        return min(core_ns - self._core_ns, idle_ns) if core_ns >= 0 <= self._core_ns else -1


class _Spent:
    """The time in the transforms of one batch. An object of its own, so that no stand-in refers to a dataset."""

    def __init__(self) -> None:
        self.thread = 0  # the thread that makes the batch; 0: none does
        self.within = False  # in a transform; transforms that it calls are part of it
        self.wall_ns = self.cpu_ns = self.calls = 0


def _holders(dataset: Any) -> list[dict[str, Any]]:
    """The attributes of a dataset and of those within it (Subset, ConcatDataset), which hold its transforms."""
    holders: dict[int, dict[str, Any]] = {}
    waiting = [dataset]
    while waiting and len(holders) < _HOLDERS:
        holder = waiting.pop(0)
        attributes = getattr(holder, "__dict__", None)
        if not isinstance(attributes, dict) or id(attributes) in holders:
            continue
        holders[id(attributes)] = attributes
        for inner in map(attributes.get, _INNER):
            inside = (
                inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list | tuple) else [inner]
            )
            waiting += list(inside)[:_HOLDERS]
    return list(holders.values())


def _through(function: Callable[..., Any]) -> Any:
    """A method that applies `function` to the user's object."""
    return lambda stand_in, *arguments: function(stand_in._gpulab_users, *arguments)


class _StandIn:
    """Stands in for a callable of the user's code; it behaves, copies and pickles like the original."""

    __slots__ = ("_gpulab_spent", "_gpulab_users")
    _gpulab_spent: _Spent
    _gpulab_users: Any

    def __init__(self, users: Any, spent: _Spent) -> None:
        object.__setattr__(self, "_gpulab_users", users)
        object.__setattr__(self, "_gpulab_spent", spent)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        spent = self._gpulab_spent
        if spent.within or spent.thread != get_ident():
            return self._gpulab_users(*args, **kwargs)
        spent.within = True
        cpu_ns, start_ns = process_time_ns(), perf_counter_ns()
        try:
            return self._gpulab_users(*args, **kwargs)
        finally:
            spent.wall_ns += perf_counter_ns() - start_ns
            spent.cpu_ns += process_time_ns() - cpu_ns
            spent.calls += 1
            spent.within = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self._gpulab_users,)

    def __eq__(self, other: object) -> Any:
        return self._gpulab_users == (other._gpulab_users if type(other) is _StandIn else other)

    __class__ = property(_through(type))
    __getattr__, __setattr__, __delattr__ = _through(getattr), _through(setattr), _through(delattr)
    __repr__, __str__, __dir__ = _through(repr), _through(str), _through(dir)
    __hash__, __bool__, __len__ = _through(hash), _through(bool), _through(len)
    __iter__, __getitem__, __contains__ = _through(iter), _through(operator.getitem), _through(operator.contains)


def _itself(users: Any) -> Any:
    return users


BESIDE = 0.01  # ours: a thread with this share of its CPU time outside of batches belongs to the training
EVERY = 32  # batches between searches for new threads
_THREAD_CLOCK = 6  # low bits of Linux's clock of a thread's CPU time; the others hold the thread's number, inverted

Clock = Callable[[int], int]  # a thread's CPU time in ns; -1 if it has ended


def thread_cpu_ns(thread: int) -> int:
    """CPU time of a thread, by its number in the system."""
    try:
        return time.clock_gettime_ns(~thread << 3 | _THREAD_CLOCK)
    except OSError:
        return -1


def native_threads() -> list[int]:
    """The threads of this process that run no Python; empty if the system does not list them."""
    if sys.platform != "linux":
        return []
    try:
        every = map(int, os.listdir("/proc/self/task"))
    except OSError:
        return []
    in_python = {thread.native_id for thread in threading.enumerate()}
    main = os.getpid()  # after a fork, Python 3.11 still has the old number
    return sorted(set(every) - in_python - {main})


class ComputeThreads:
    """Measures the CPU time of the training's native threads; `begin` and `end` enclose each batch."""

    def __init__(self, threads: Callable[[], list[int]] = native_threads, clock: Clock = thread_cpu_ns) -> None:
        self._threads, self._clock = threads, clock
        self._last: dict[int, int] = {}
        self._within: dict[int, int] = {}
        self._beside: dict[int, int] = {}
        self._batches = 0

    def begin(self, *, follows: bool = True) -> None:
        """A batch begins; `follows`: the previous batch was timed too, so no untimed one lies between."""
        if self._last:
            self._pass_on(self._beside if follows else {})
        # often at first, because the first step starts torch's thread pool
        if self._batches % EVERY == 0 or self._batches & (self._batches - 1) == 0:
            for thread in self._threads():
                self._last.setdefault(thread, self._clock(thread))
        self._batches += 1

    def end(self) -> int:
        """The batch is made; returns the CPU time (ns) that threads of the training used meanwhile."""
        if not self._last:
            return 0
        used = self._pass_on(self._within)
        return sum(ns for thread, ns in used.items() if self._trains(thread))

    def _trains(self, thread: int) -> bool:
        beside = self._beside.get(thread, 0)
        return beside > BESIDE * (beside + self._within.get(thread, 0))

    def _pass_on(self, sums: dict[int, int]) -> dict[int, int]:
        used = {}
        for thread, before in list(self._last.items()):
            now = self._clock(thread)
            if now < before:  # it has ended, and its number may be another thread's now
                del self._last[thread]
                continue
            used[thread], self._last[thread] = now - before, now
            sums[thread] = sums.get(thread, 0) + now - before
        return used


HERE = -1  # in place of a worker's number
PERIOD_S = 0.003
_FETCH = ("torch/utils/data/_utils/fetch.py", ".fetch")  # torch's method; gpulab's times only few batches


class WorkerStart:
    """Takes the place of a loader's `worker_init_fn` while its workers start; `users` is the original, or None."""

    def __init__(
        self, users: Callable[[int], None] | None, memory: SharedRows, first: int, channel: Channel | None, name: str
    ) -> None:
        self.users = users
        self._memory, self._first = memory, first
        self._channel, self._name = channel, name

    def __call__(self, worker: int) -> None:
        with suppress(Exception):
            self._time(worker)
        with suppress(Exception):
            sample_loading(self._channel, self._name, worker)
        if self.users is not None:
            self.users(worker)

    def _time(self, worker: int) -> None:
        """Instrument the fetcher, which torch creates after this call, and again for each new epoch."""
        from torch import get_num_threads
        from torch.utils.data import _DatasetKind, get_worker_info
        from torch.utils.data._utils import worker as loop

        info, memory = get_worker_info(), self._memory
        original = _DatasetKind.create_fetcher
        epochs, pace = itertools.count(), FetchPace(self._first)

        def create_fetcher(kind: Any, dataset: Any, *rest: Any, **kwargs: Any) -> Any:
            fetcher = original(kind, dataset, *rest, **kwargs)  # type: ignore[no-untyped-call]
            if info is not None and dataset is info.dataset:  # not if the dataset itself iterates another loader
                with suppress(Exception):
                    memory.add_threads(get_num_threads())  # after the user's worker_init_fn, which may have set it
                    WorkerFetchClock(fetcher, dataset, pace, memory, worker, next(epochs)).put_in()
            return fetcher

        _DatasetKind.create_fetcher = staticmethod(create_fetcher)  # type: ignore[method-assign]
        loop.ExceptionWrapper = _without_our_frames(loop.ExceptionWrapper)  # type: ignore[assignment,attr-defined]


class WorkerFetchClock(FetchClock):
    """The clock of one epoch in a worker; rows go to shared memory, with the epoch and the batch's number from 0."""

    def __init__(
        self, fetcher: Any, dataset: Any, pace: FetchPace, memory: SharedRows, worker: int, epoch: int
    ) -> None:
        super().__init__(fetcher, dataset, pace)
        self._memory, self._rows = memory, memory.of_worker[worker]
        self._epoch, self._number = epoch, -1

    def fetch(self, index: Any) -> Any:
        if not self.works or not self._memory.on:
            return self._take(self._fetcher(), index)
        self._number += 1
        if self.pace.skip:
            self.pace.skip -= 1
            return self._take(self._fetcher(), index)
        return FetchClock.fetch(self, index)  # `super()` costs 0.3 µs more

    def _keep(self, row: Row, entered_ns: int) -> None:
        self._rows.append((self._epoch, self._number, *row))
        FetchClock._keep(self, row, entered_ns)
        self.pace.add(self.own_ns, perf_counter_ns())


def _without_our_frames(wrapper: Any) -> Callable[..., Any]:
    """Keep gpulab's lines out of the traceback that a worker sends, as text, in place of a batch."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if error is not None:
            with suppress(Exception):
                hide_gpulabs_frames(error)
        return wrapper(*args, **kwargs)

    return wrapped


def sample_loading(channel: Channel | None, name: str, worker: int) -> None:
    """Have the calling thread sampled while it makes batches; `name` is that of its iterator."""
    if channel is not None:
        channel.sample(sampling_key(name, worker), PERIOD_S, _FETCH, spares=True)


def sampling_key(name: str, worker: int) -> str:
    return f"{name}, worker {worker}"


def is_collating(stack: Iterable[Spot]) -> bool:
    """Whether a stack, whose outermost line is in a fetch, is within `collate_fn`."""
    *_, (file, line, _) = stack
    return "collate_fn" in linecache.getline(file, line)
