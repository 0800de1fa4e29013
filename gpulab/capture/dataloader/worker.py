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

from gpulab.capture.dataloader.fetch_clock import FetchClock, Pace, Row
from gpulab.capture.dataloader.rows import SharedRows
from gpulab.capture.stacks.stack import Spot
from gpulab.capture.stacks.watcher import Channel
from gpulab.user_code import hide_gpulabs_frames

HERE = -1  # in place of a worker's number
PERIOD_S = 0.003
_FETCH = ("torch/utils/data/_utils/fetch.py", ".fetch")  # of any fetcher of torch's, as few batches are timed


class WorkerStart:
    """In place of a loader's `worker_init_fn` while its workers start; `users` is that, or None."""

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
            watch_loading(self._channel, self._name, worker)
        if self.users is not None:
            self.users(worker)

    def _time(self, worker: int) -> None:
        """torch makes the worker's fetcher after this, and again whenever the loader is iterated anew."""
        from torch import get_num_threads
        from torch.utils.data import _DatasetKind, get_worker_info
        from torch.utils.data._utils import worker as loop

        info, memory = get_worker_info(), self._memory
        original = _DatasetKind.create_fetcher
        epochs, pace = itertools.count(), Pace(self._first)

        def create_fetcher(kind: Any, dataset: Any, *rest: Any, **named: Any) -> Any:
            fetcher = original(kind, dataset, *rest, **named)  # type: ignore[no-untyped-call]
            if info is not None and dataset is info.dataset:  # else a loader that the dataset itself has made
                with suppress(Exception):
                    memory.has_threads(get_num_threads())  # after the user's worker_init_fn, which may have set it
                    WorkerFetchClock(fetcher, dataset, pace, memory, worker, next(epochs)).put_in()
            return fetcher

        _DatasetKind.create_fetcher = staticmethod(create_fetcher)  # type: ignore[method-assign]
        loop.ExceptionWrapper = _without_our_frames(loop.ExceptionWrapper)  # type: ignore[assignment,attr-defined]


class WorkerFetchClock(FetchClock):
    """In a worker, for an epoch: what it times goes to the memory, with the batch's number from 0."""

    def __init__(self, fetcher: Any, dataset: Any, pace: Pace, memory: SharedRows, worker: int, epoch: int) -> None:
        super().__init__(fetcher, dataset, pace)
        self._memory, self._rows = memory, memory.of_worker[worker]
        self._epoch, self._number = epoch, -1

    def fetch(self, index: Any) -> Any:
        if not self.works or not self._memory.on:
            return self._take(self._fetcher(), index)
        self._number += 1
        if self.pace.left:
            self.pace.left -= 1
            return self._take(self._fetcher(), index)
        return FetchClock.fetch(self, index)  # a `super` of each batch costs 0.3 µs

    def _keep(self, row: Row, entered_ns: int) -> None:
        self._rows.append((self._epoch, self._number, *row))
        FetchClock._keep(self, row, entered_ns)
        self.pace.timed(self.own_ns, perf_counter_ns())


def _without_our_frames(wrapper: Any) -> Callable[..., Any]:
    """What a worker sends in place of a batch is the text of its traceback: none of our lines shall be in it."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if error is not None:
            with suppress(Exception):
                hide_gpulabs_frames(error)
        return wrapper(*args, **kwargs)

    return wrapped


def watch_loading(channel: Channel | None, name: str, worker: int) -> None:
    """Have the calling thread looked at while it makes batches; `name` is of its iterator."""
    if channel is not None:
        channel.watch(watch_key(name, worker), PERIOD_S, _FETCH, spares=True)


def watch_key(name: str, worker: int) -> str:
    return f"{name}, worker {worker}"


def is_collating(stack: Iterable[Spot]) -> bool:
    """Whether a stack that ends in a fetch is within `collate_fn`."""
    *_, (file, line, _) = stack
    return "collate_fn" in linecache.getline(file, line)
