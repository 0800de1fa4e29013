"""Has the batches of a run timed where they are made, and joins that with when the training loop had them.

For the length of a run these methods of torch's iterators are replaced at the class, so that copies of loaders, which
knobs make, are heard too: the making of an iterator with workers, its beginning anew, and the handing over of a batch;
and the function that pins one. A loader has another `worker_init_fn` while its workers start, and its own again after
that. Batches are told apart by the worker that made them: torch gives out those of one worker in the order in which
it made them.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from gpulab.capture.dataloader.fetch_clock import FIRST, FIRST_AGAIN, Pace, TimedFetcher
from gpulab.capture.dataloader.iterator_times import KEPT, Feed, FromWorkers, Here, Timed
from gpulab.capture.dataloader.worker import HERE, LoadingWatch
from gpulab.capture.stacks.watcher import Looks, StackWatcher
from gpulab.run import Batches, Choice, Missing
from gpulab.torch_hooks.patching import replaced

WHAT = "what takes the time inside the DataLoader"
_PINNED_KEPT = 1024  # batches that are pinned and were not asked for yet

_begun: weakref.WeakKeyDictionary[Any, FromWorkers] = (
    weakref.WeakKeyDictionary()
)  # by iterator: its workers may outlive


class LoadingClock:
    """Of one run, on the thread that made it; the run began at `origin_ns` (`time.perf_counter_ns`)."""

    def __init__(self, origin_ns: int, watcher: StackWatcher | None = None) -> None:
        self._origin_ns = origin_ns
        self._thread, self._process = get_ident(), os.getpid()
        self._feeds: list[Feed] = []
        self._watcher = watcher
        self._watched_here: LoadingWatch | None = None
        self._here: weakref.WeakKeyDictionary[Any, Here] = weakref.WeakKeyDictionary()
        self._timed_here: dict[int | None, tuple[Timed, Pace]] = {}  # by loader: its epochs share them
        self._from: weakref.WeakKeyDictionary[Any, FromWorkers] = weakref.WeakKeyDictionary()
        self._started: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders whose workers were started in this run
        self._untimed: set[int | None] = set()  # loaders whose workers were there before
        self._pinned: dict[int, int] = {}  # ns, by the id of what was pinned
        self._pinning = threading.local()
        self.asked: int | None = None  # the loader of that number is asked for a batch now
        self._newest_here: tuple[Callable[[], Any], Pace] = (_nothing, Pace())  # nearly always asked again
        self._newest_feed: tuple[Callable[[], Any], FromWorkers | None] = (_nothing, None)
        self.own_ns = 0  # what timing the batches took on this thread, since somebody has put it to 0
        self._fault: Exception | None = None
        self.worker_threads: int | None = None  # once finished: the most that an operator in a worker is split among

    def start(self, undo: ExitStack) -> None:
        """Hear everything until `undo`. Needs torch to be imported; one that has no such methods is not timed."""
        with ExitStack() as mine:
            try:
                mine.callback(self._rest)
                self._replace(mine)
            except Exception as e:
                self._fault = e
            else:
                undo.push(mine.pop_all())

    def _replace(self, undo: ExitStack) -> None:
        from torch.utils.data import dataloader
        from torch.utils.data._utils import pin_memory

        several, single = dataloader._MultiProcessingDataLoaderIter, dataloader._SingleProcessDataLoaderIter
        for owner, name, wrap in (
            (several, "__init__", self._wrap_init),
            (several, "_reset", self._wrap_reset),
            (several, "_next_data", self._wrap_next_of_workers),
            (several, "_process_data", self._wrap_process),
            (single, "_next_data", self._wrap_next_here),
            (pin_memory, "pin_memory", self._wrap_pin),
        ):
            undo.enter_context(replaced(owner, name, wrap))

    def finish(self, feeder: int | None) -> tuple[Batches | None, tuple[Missing, ...], tuple[Choice, ...]]:
        """After the run: what was timed of the loader that fed its steps, and what there is to say of it."""
        mine = [feed for feed in self._feeds if feeder is None or feed.loader == feeder]
        timed = Timed()
        for feed in mine:
            feed.close()
        for each in dict.fromkeys(feed.timed for feed in mine):
            timed.add(each)
        self.worker_threads = max((feed.threads for feed in mine if feed.threads is not None), default=None)
        batches = timed.batches(self._origin_ns, perf_counter_ns())
        self._feeds.clear()
        self._newest_feed = (_nothing, None)  # it holds the workers' memory
        choices = () if not timed.left_out else (_newest_kept(timed.left_out),)
        return batches, self._missing(feeder, batches), choices

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
        for feed in self._feeds:
            feed.stop()

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

    def _wrap_init(self, original: Any) -> Any:
        @functools.wraps(original)
        def __init__(iterator: Any, loader: Any, *rest: Any, **named: Any) -> None:
            feed = self._tried(lambda: self._new_feed(loader)) if self._hears else None
            if feed is None:
                original(iterator, loader, *rest, **named)
                return
            with feed.starting(iterator, loader):
                original(iterator, loader, *rest, **named)
            self._feeds.append(feed)
            self._from[iterator] = _begun[iterator] = feed

        return __init__

    def _new_feed(self, loader: Any) -> FromWorkers | None:
        for feed in self._feeds:
            feed.close_if_over()
        first = FIRST_AGAIN if loader in self._started else FIRST
        self._started.add(loader)
        return FromWorkers.of(loader, first, self._looks(f"loader {len(self._feeds)}"))

    def _wrap_reset(self, original: Any) -> Any:
        @functools.wraps(original)
        def _reset(iterator: Any, loader: Any, first_iter: bool = False, *rest: Any, **named: Any) -> Any:
            if self._hears and not first_iter:
                self._tried(lambda: self._begin_anew(iterator))
            return original(iterator, loader, first_iter, *rest, **named)

        return _reset

    def _begin_anew(self, iterator: Any) -> None:
        """Workers that an earlier run has timed are timed again from here on."""
        feed = self._from.get(iterator)
        if feed is None and iterator in _begun:
            feed = self._from[iterator] = _begun[iterator]
            self._feeds.append(feed)
        self._newest_feed = (_nothing, None)
        if feed is not None:
            feed.begin_anew()

    def _wrap_next_of_workers(self, original: Any) -> Any:
        @functools.wraps(original)
        def _next_data(iterator: Any) -> Any:
            newest, feed = self._newest_feed
            if newest() is not iterator:
                if not self._hears:
                    return original(iterator)
                feed = self._from.get(iterator)
                self._newest_feed = weakref.ref(iterator), feed
                if feed is None:
                    self._untimed.add(self.asked)
            if feed is None:
                return original(iterator)
            feed.asked(self.asked)
            try:
                return original(iterator)
            finally:
                feed.answered()

        return _next_data

    def _wrap_process(self, original: Any) -> Any:
        @functools.wraps(original)
        def _process_data(iterator: Any, data: Any, *rest: Any) -> Any:
            newest, feed = self._newest_feed
            if (
                feed is not None and rest and newest() is iterator
            ):  # a torch that does not say which worker made it: never known
                feed.given(rest[0], self._pin_ns(iterator, data))
            return original(iterator, data, *rest)

        return _process_data

    # -- iterators without workers -------------------------------------------------------------------------------

    def _wrap_next_here(self, original: Any) -> Any:
        @functools.wraps(original)
        def _next_data(iterator: Any) -> Any:
            newest, pace = self._newest_here
            if pace.left and newest() is iterator:
                pace.left -= 1
                return original(iterator)
            entered_ns = perf_counter_ns()
            feed = self._tried(lambda: self._feed_here(iterator)) if self._hears else None
            if feed is None:
                return original(iterator)
            if feed.pace.left:  # of an epoch before
                feed.pace.left -= 1
                return original(iterator)
            feed.loader = self.asked
            feed.asked()
            asked_ns = perf_counter_ns()
            try:
                data = original(iterator)
            finally:
                answered_ns = perf_counter_ns()
                feed.rest()
            feed.answered(asked_ns, answered_ns, self._pin_ns(iterator, data))
            now_ns = perf_counter_ns()
            own_ns = asked_ns - entered_ns + feed.own_ns + now_ns - answered_ns
            self.own_ns += own_ns
            feed.pace.timed(own_ns, now_ns)
            return data

        return _next_data

    def _feed_here(self, iterator: Any) -> Here:
        feed = self._here.get(iterator)
        if feed is None:
            for other in self._feeds:
                other.close_if_over()
            if self.asked not in self._timed_here:
                self._timed_here[self.asked] = Timed(), Pace()
            feed = self._here[iterator] = Here(*self._timed_here[self.asked])
            # all loaders without workers share one: it looks at this thread
            if self._watched_here is None:
                self._watched_here = self._looks("training process")
                if self._watched_here is not None:
                    self._watched_here.watch(HERE)
            feed.looks = self._watched_here
            feed.fetcher = TimedFetcher(iterator._dataset_fetcher, iterator._dataset, feed)
            self._feeds.append(feed)
        self._newest_here = weakref.ref(iterator), feed.pace
        return feed

    # -- looking at who makes them ---------------------------------------------------------------------------------

    def _looks(self, name: str) -> LoadingWatch | None:
        channel = self._watcher.channel if self._watcher is not None else None
        return LoadingWatch(channel, name) if channel is not None else None

    def looks(self, feeder: int | None) -> list[Looks]:
        """After the run: what was seen where the loader that fed its steps made its batches."""
        mine = [feed for feed in self._feeds if feeder is None or feed.loader == feeder]
        watches = {
            feed.looks: range(feed.count) if isinstance(feed, FromWorkers) else (HERE,)
            for feed in mine
            if feed.looks is not None
        }
        return [seen for watch, workers in watches.items() for seen in watch.seen(self._watcher, workers)]

    # -- pinning -------------------------------------------------------------------------------------------------

    def _wrap_pin(self, original: Any) -> Any:
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
            if len(self._pinned) >= _PINNED_KEPT:
                self._pinned.clear()
            self._pinned[id(pinned)] = perf_counter_ns() - start_ns
            return pinned

        return pin_memory

    def _pin_ns(self, iterator: Any, data: Any) -> int:
        return self._pinned.pop(id(data), -1) if getattr(iterator, "_pin_memory", False) else 0


def _nothing() -> None:
    """No iterator was asked yet."""


def _newest_kept(left_out: int) -> Choice:
    why = f"{left_out:,} before them are not kept"
    return Choice("batches timed inside the DataLoader", f"the last {KEPT:,}", why)
