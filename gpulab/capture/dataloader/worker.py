"""Runs in the workers of a DataLoader: times the batches that they make, and is to the user as if it were not there.

Workers that are started, not forked, import this module: it needs no more than torch, which they have.
"""

from __future__ import annotations

import itertools
import linecache
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import perf_counter_ns
from typing import Any

from gpulab.capture.dataloader.fetch_clock import Pace, Row, TimedFetcher
from gpulab.capture.dataloader.shared_rows import SharedRows
from gpulab.capture.stacks.stack import Spot
from gpulab.capture.stacks.watcher import Channel, Looks, StackWatcher
from gpulab.user_code import hide_gpulabs_frames


class WorkerStart:
    """In place of a loader's `worker_init_fn` while its workers start; `users` is that, or None."""

    def __init__(
        self, users: Callable[[int], None] | None, memory: SharedRows, first: int, looks: LoadingWatch | None = None
    ) -> None:
        self.users = users
        self._first = first
        self._memory = memory
        self._looks = looks

    def __call__(self, worker: int) -> None:
        with suppress(Exception):
            _time_this_worker(self._memory, worker, self._first)
        with suppress(Exception):
            if self._looks is not None:
                self._looks.watch(worker)
        if self.users is not None:
            self.users(worker)


class _Written:
    """What one worker times goes to its part of the memory, numbered from 0 in each epoch."""

    def __init__(self, memory: SharedRows, worker: int, epoch: int, pace: Pace) -> None:
        self._memory = memory
        self._pace = pace
        self._worker = worker
        self._epoch = epoch
        self._next = 0
        self._works = True

    def begins(self) -> bool:
        if not self._works or not self._memory.on:
            return False
        self._number = self._next
        self._next += 1
        if self._pace.left:
            self._pace.left -= 1
            return False
        return True

    def add(self, row: Row) -> None:
        self._memory.write(self._worker, (self._epoch, self._number, *row))

    def cost(self, own_ns: int) -> None:
        self._pace.timed(own_ns, perf_counter_ns())

    def broken(self) -> None:
        self._works = False


def _time_this_worker(memory: SharedRows, worker: int, first: int) -> None:
    """torch makes the worker's fetcher after this, and again whenever the loader is iterated anew."""
    from torch import get_num_threads
    from torch.utils.data import _DatasetKind, get_worker_info
    from torch.utils.data._utils import worker as loop

    info = get_worker_info()
    original = _DatasetKind.create_fetcher
    epochs, pace = itertools.count(), Pace(first)

    def create_fetcher(kind: Any, dataset: Any, *rest: Any, **named: Any) -> Any:
        fetcher = original(kind, dataset, *rest, **named)  # type: ignore[no-untyped-call]
        if info is not None and dataset is info.dataset:  # else a loader that the dataset itself has made
            with suppress(Exception):
                memory.has_threads(get_num_threads())  # after the user's worker_init_fn, which may have set it
                TimedFetcher(fetcher, dataset, _Written(memory, worker, next(epochs), pace)).put_in()
        return fetcher

    _DatasetKind.create_fetcher = staticmethod(create_fetcher)  # type: ignore[method-assign]
    loop.ExceptionWrapper = _without_our_frames(loop.ExceptionWrapper)  # type: ignore[assignment,attr-defined]


def _without_our_frames(wrapper: Any) -> Callable[..., Any]:
    """What a worker sends in place of a batch is the text of its traceback: none of our lines shall be in it."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if error is not None:
            with suppress(Exception):
                hide_gpulabs_frames(error)
        return wrapper(*args, **kwargs)

    return wrapped


HERE = -1  # in place of a worker's number
PERIOD_S = 0.003
_FETCH = ("torch/utils/data/_utils/fetch.py", ".fetch")  # of any fetcher of torch's, as few batches are timed


class LoadingWatch:
    """Of one iterator, or of all without workers; `name` tells them apart."""

    def __init__(self, channel: Channel, name: str) -> None:
        self._channel, self._name = channel, name

    def watch(self, worker: int) -> None:
        """Have the calling thread looked at while it makes batches."""
        self._channel.watch(self._key(worker), PERIOD_S, _FETCH, spares=True)

    def seen(self, watcher: StackWatcher | None, workers: Iterable[int]) -> list[Looks]:
        """What was seen of each; they are looked at no more."""
        if watcher is None:
            return []
        for worker in workers:
            self._channel.rest(self._key(worker))
        answers = [watcher.looks(self._key(worker)) for worker in workers]
        return [looks for looks in answers if looks is not None]

    def _key(self, worker: int) -> str:
        return f"{self._name}, worker {worker}"


def is_collating(stack: Iterable[Spot]) -> bool:
    """Whether a stack that ends in a fetch is within `collate_fn`."""
    *_, (file, line, _) = stack
    return "collate_fn" in linecache.getline(file, line)
