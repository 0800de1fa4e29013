"""Describes the DataLoaders of a run: their settings, the user's lines that make batches, and failures of workers.

No object of the user's code is changed. If stacks in workers are not sampled, the user's lines are the nearest hint at
a cause. Failures: a worker dies, or none can start because its code is in a notebook.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from msgspec import Struct

from gpulab.capture.fetch_clock import TRANSFORMS
from gpulab.capture.stack_reader import Spot
from gpulab.formatting import plural
from gpulab.knobs.description import (
    defined_in_main,
    length_of,
    loader_record,
    main_can_be_imported,
    start_method,
    users_dataset,
)
from gpulab.run import Loader, Missing
from gpulab.user_code import is_users_file

_DEPTH = 4
_MOST_PARTS = 1_000
MOST_LOADERS = 32
_DEATH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>\d+(?:, \d+)*)\) "
    r"(?P<how>is killed by signal: [^.\n]+|exited unexpectedly(?: with exit code \d+)?)"
)


class _Facts(Struct):
    """One loader."""

    loader: Loader
    lines: dict[str, Spot | None]  # of `lines_of_batches`
    emptiness: str  # why it would return no batch
    tensors: int | None = None  # in its first batch
    feeds: bool = False  # it feeds or has fed the steps


class Loaders:
    """The newest DataLoaders of a run, by the hooks' number; `record` is the one that feeds the steps."""

    def __init__(self) -> None:
        self.record: Loader | None = None
        self.emptiness = ""  # why a loader has ended without a batch; empty once any loader has returned one
        self._facts: dict[int, _Facts] = {}
        self._has_batch = False

    def add(self, number: int, owner: Any, feeder: int | None) -> Loader | None:
        """Describe a loader that begins an epoch; None if that is impossible. `feeder`: the steps' loader."""
        if not (hasattr(owner, "num_workers") or hasattr(owner, "_num_workers")):
            return None
        loader = loader_record(owner)
        if len(self._facts) >= MOST_LOADERS:
            self._facts = {n: each for n, each in self._facts.items() if n == feeder}
        facts = _Facts(loader, lines_of_batches(owner), emptiness(owner, loader))
        if (before := self.of(number)) is not None:
            facts.tensors, facts.feeds = before.tensors, before.feeds
        self._facts[number] = facts
        return loader

    @property
    def is_described(self) -> bool:
        """Whether any loader could be described."""
        return bool(self._facts)

    def of(self, number: int | None) -> _Facts | None:
        """The loader of that number; None if unknown."""
        return self._facts.get(number) if number is not None else None

    def exhausted(self, number: int) -> None:
        """The loader of that number has no more batches."""
        if not self._has_batch:
            facts = self.of(number)
            self.emptiness = facts.emptiness if facts is not None else ""

    def add_batch(self, number: int, batch: Any) -> None:
        """The loader of that number has returned this batch; the tensors of its first batch are counted."""
        self.emptiness, self._has_batch = "", True
        facts = self.of(number)
        if facts is not None and facts.tensors is None:
            facts.tensors = sum(hasattr(part, "storage_offset") for part in arrays_in(batch))

    @property
    def remade(self) -> bool:
        """Whether several equal loaders fed the steps, one after the other."""
        return sum(each.feeds and each.loader == self.record for each in self._facts.values()) > 1

    def feeds(self, number: int | None) -> Loader | None:
        """Record that this loader feeds the steps, and return it; None if unknown."""
        facts = self.of(number)
        if facts is None:
            return None
        facts.feeds, self.record = True, facts.loader
        return facts.loader


def emptiness(owner: Any, record: Loader) -> str:
    """Why a loader would return no batch at all."""
    sampler = getattr(owner, "batch_sampler", None)
    sampler = getattr(owner, "_index_sampler", None) if sampler is None else sampler
    batch_size, drop_last = record.batch_size, getattr(sampler, "drop_last", getattr(owner, "drop_last", False))
    if record.iterable:
        fewer = f", or after fewer than {batch_size} items (drop_last)" if drop_last and batch_size else ""
        return f"its IterableDataset {record.dataset} ended at once{fewer}"
    items, chooser = record.dataset_length, getattr(sampler, "sampler", sampler)
    item_count = length_of(chooser)
    if items and item_count == 0:
        return f"its {type(chooser).__name__} chooses none of {plural(items, 'item')}"
    count = f"{record.dataset} has 0 items" if items == 0 else plural(item_count or items or 0, "item")
    size = f", batch_size {batch_size}" if batch_size is not None and items != 0 else ""
    return f"{count}{size}{', drop_last' if drop_last and items != 0 else ''}"


def samples_in(batch: Any) -> int | None:
    """Samples in a batch: the first dimension of the first array in it; None without an array.

    Collate functions may also return a list of samples (tuples), or its transpose `tuple(zip(*samples))`, as for
    detection models. Then the samples are counted.
    """
    if isinstance(batch, list | tuple) and batch and type(batch[0]) is tuple and type(batch[-1]) is tuple:
        if type(batch) is list:
            return len(batch)
        lengths = {len(part) if type(part) is tuple else -1 for part in batch}
        if len(lengths) == 1:
            return lengths.pop()
    return next((int(part.shape[0]) for part in arrays_in(batch) if len(part.shape)), None)


def arrays_in(batch: Any, depth: int = 0) -> Iterator[Any]:
    """The tensors and NumPy arrays in a nested batch, up to some thousands."""
    if hasattr(batch, "numel") or hasattr(batch, "shape"):
        yield batch
    elif depth < _DEPTH and isinstance(batch, list | tuple | Mapping):
        parts = batch.values() if isinstance(batch, Mapping) else batch
        for part in itertools.islice(parts, _MOST_PARTS):
            yield from arrays_in(part, depth + 1)


_ITEMS = ("__getitems__", "__getitem__", "__iter__")
_WITHIN = ("dataset", "datasets", "data_collator", "collate_fn", "transforms", "__wrapped__")


def lines_of_batches(owner: Any) -> dict[str, Spot | None]:
    """The user's lines that make batches or choose their items, by their names in `Loader`; None for a library's code.

    `owner` is a DataLoader, or an iterator made before the run.
    """
    dataset = users_dataset(getattr(owner, "dataset", getattr(owner, "_dataset", None)))
    collate = getattr(owner, "collate_fn", getattr(owner, "_collate_fn", None))
    chooser = getattr(owner, "_index_sampler", None)  # of batches, or of single items
    choosers = (chooser, *map(_attributes(chooser).get, ("sampler", "batch_sampler")))
    transforms = (_attributes(part).get(name) for part in _parts(dataset) for name in TRANSFORMS)
    return {
        "items_line": _first_spot(getattr(type(part), name, None) for part in _parts(dataset) for name in _ITEMS),
        "transform_line": _first_spot(call for transform in transforms for call in _calls(transform)),
        "collate_line": _first_spot(_calls(collate)),
        "sampler_line": _first_spot(getattr(type(each), "__iter__", None) for each in choosers),
    }


def _calls(call: Any) -> Iterator[Any]:
    """The functions that a call of this object may run: the object itself, its `__call__`, and those within it."""
    for part in _parts(call):
        yield part
        yield getattr(type(part), "__call__", None)  # noqa: B004


def _parts(thing: Any, depth: int = 0) -> Iterator[Any]:
    if thing is None or depth > _DEPTH:
        return
    yield thing
    if isinstance(thing, functools.partial):
        yield from _parts(thing.func, depth + 1)
    for name in _WITHIN:
        inner = _attributes(thing).get(name)
        for one in inner[:_DEPTH] if isinstance(inner, list | tuple) else (inner,):
            yield from _parts(one, depth + 1)


def _attributes(thing: Any) -> dict[str, Any]:
    """Its own attributes, without properties, which would run the user's code."""
    part: dict[str, Any] = getattr(thing, "__dict__", {})
    return part


def _first_spot(functions: Iterable[Any]) -> Spot | None:
    """The line of the first of these functions that is in the user's code."""
    for function in functions:
        code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
        if code is not None and is_users_file(code.co_filename):
            return code.co_filename, code.co_firstlineno, code.co_qualname
    return None


class Workers:
    """Failures of DataLoader workers in a run. Times are ns since the run began."""

    def __init__(self) -> None:
        self._cannot_start: Missing | None = None
        self._death: Missing | None = None

    def check(self, loader: Any, now_ns: int) -> None:
        """A loader is about to make an iterator: warn once if its workers cannot start."""
        why = cannot_start(loader) if self._cannot_start is None else None
        if why is None:
            return
        self._cannot_start = Missing("data from the DataLoader's workers", why, now_ns, "workers")
        with suppress(OSError, ValueError, AttributeError):  # standard error is closed or missing
            sys.stderr.write(f"gpulab: {why}.\n")

    def fail(self, error: str, now_ns: int, iterator: Any = None) -> None:
        """The user's code failed with this error, perhaps because a worker died. The first death counts."""
        how = death(error, iterator) if self._death is None else None
        if how is not None:
            self._death = Missing("data from a DataLoader worker", how, now_ns, "loader")

    def missing(self, *, fed: bool) -> tuple[Missing, ...]:
        """What is missing because of failures. `fed`: the run had batches, so the workers did start after all."""
        predicted = self._cannot_start if self._death is not None or not fed else None
        return tuple(m for m in (self._death, predicted) if m is not None)


@contextmanager
def ignoring_worker_deaths() -> Iterator[None]:
    """Inside the block, torch does not raise that a worker died, which would interrupt gpulab's own work.

    torch's signal handler checks all workers, including those of earlier cells, whenever any child process ends, as
    gpulab's children do at the end of a run. A loader that lost a worker still raises at its next batch.
    """
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except RuntimeError as e:
            if death(str(e)) is None:
                raise

    signal.signal(signal.SIGCHLD, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is handle:
            signal.signal(signal.SIGCHLD, handler)


def death(error: str, iterator: Any = None) -> str | None:
    """Which worker died and how, according to torch's message `error`; None for any other error.

    `iterator` is the DataLoader's; its processes show more than the message.
    """
    match = _DEATH.search(error)
    if match is None:
        return None
    pids = [int(pid) for pid in match["pids"].split(", ")]
    codes = {w.pid: w.exitcode for w in getattr(iterator, "_workers", ())}
    ends = [f"worker process {pid} {_how(codes[pid])}" for pid in pids if codes.get(pid) is not None]
    if ends:
        return ", ".join(ends)
    processes = "worker process" if len(pids) == 1 else "worker processes"
    return f"{processes} {match['pids']} {match['how'].removeprefix('is ')}"


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    names = {s.value: s.name for s in signal.Signals}
    return f"was killed by signal {-code} ({names.get(-code, 'unknown')})"


def cannot_start(loader: Any) -> str | None:
    """Why the workers that a DataLoader is about to start will fail; None if they should work.

    A worker that is not forked imports what it needs by name, but cannot import a notebook, whose `__main__` is no
    file. This check starts and pickles nothing.
    """
    if not getattr(loader, "num_workers", 0) or getattr(loader, "_iterator", None) is not None:
        return None
    method = start_method(loader)
    if method == "fork" or main_can_be_imported():
        return None
    try:
        names = defined_in_main(loader)
    except Exception:  # a user's object may raise at any access
        return None
    if not names:
        return None
    return (
        f"the DataLoader's workers (start method {method}) will not find {', '.join(names)}: defined in a notebook, "
        "which they cannot import. Move it to a .py file and import it, or use num_workers=0"
    )
