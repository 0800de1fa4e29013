"""What a DataLoader is and gave, what goes wrong with its workers, and where the user's code of a batch is written.

Nothing is changed. Workers run that code in processes of their own, where no stack is sampled: then its lines are the
nearest to the cause. What goes wrong: one dies, or none can start because their code is in a notebook.
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
    as_written,
    defined_in_main,
    length_of,
    loader_record,
    main_can_be_imported,
    start_method,
)
from gpulab.run import Loader, Missing
from gpulab.user_code import is_users_file

_DEPTH = 4
_MOST_PARTS = 1_000
LOADERS_KEPT = 32
_DEATH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>\d+(?:, \d+)*)\) "
    r"(?P<how>is killed by signal: [^.\n]+|exited unexpectedly(?: with exit code \d+)?)"
)


class Written(Struct, frozen=True):
    """Lines of the user's code that makes batches, or chooses their items; None where it is a library's."""

    items: Spot | None = None
    transform: Spot | None = None
    collate: Spot | None = None
    sampler: Spot | None = None


class _Description(Struct, frozen=True):
    """A loader, where the code of its batches is written, and what would make it give none."""

    loader: Loader
    written: Written
    emptiness: str


class Loaders:
    """The DataLoaders met in a run, by the hooks' number, the newest only; `record` is the one that feeds the steps."""

    def __init__(self) -> None:
        self.record: Loader | None = None
        self._met: dict[int, _Description] = {}
        self._tensors: dict[int, int] = {}
        self._fed: set[int] = set()
        self.emptiness = ""  # of a loader that has ended without a batch; empty where one gave a batch

    def meet(self, number: int, owner: Any, feeder: int | None) -> Loader | None:
        """A loader is asked for the first time, or anew. `feeder` is the number of the one that feeds the steps."""
        loader = describe_loader(owner)
        if loader is not None:
            if len(self._met) >= LOADERS_KEPT:
                self._met = {n: each for n, each in self._met.items() if n == feeder}
            self._met[number] = _Description(loader, written(owner), emptiness(owner, loader))
        return loader

    @property
    def met(self) -> bool:
        """Any that could be described."""
        return bool(self._met)

    def written(self, number: int | None) -> Written:
        """Where the code of that loader's batches is written."""
        return self._met[number].written if number in self._met else Written()

    def ended(self, number: int) -> None:
        """The loader of that number has no more batch."""
        if not self._tensors:
            self.emptiness = self._met[number].emptiness if number in self._met else ""

    def gave(self, number: int, batch: Any) -> None:
        """The loader of that number has given this batch; the first one tells of how many tensors they are."""
        self.emptiness = ""
        if number not in self._tensors and len(self._tensors) < LOADERS_KEPT:
            self._tensors[number] = tensors_in(batch)

    @property
    def remade(self) -> bool:
        """Whether several loaders that are alike fed the steps one after the other."""
        alike = (number for number, each in self._met.items() if each.loader == self.record)
        return len(self._fed.intersection(alike)) > 1

    def tensors(self, number: int | None) -> int | None:
        """In a batch of that loader; None where it gave none."""
        return self._tensors.get(number) if number is not None else None

    def feeds(self, number: int) -> Loader | None:
        """This one feeds the steps; None where nothing is known of it."""
        self._fed.add(number)
        loader = self._met[number].loader if number in self._met else None
        self.record = loader or self.record
        return loader


def describe_loader(owner: Any) -> Loader | None:
    """The settings of a DataLoader; of a bare iterator (made before the run) what it still knows."""
    if hasattr(owner, "batch_sampler"):
        return loader_record(owner)
    if not hasattr(owner, "_num_workers"):
        return None
    return Loader(
        dataset=type(as_written(owner._dataset)).__name__,
        dataset_length=length_of(owner._dataset),
        batch_size=getattr(owner._index_sampler, "batch_size", None),
        num_workers=owner._num_workers,
        prefetch_factor=getattr(owner, "_prefetch_factor", None),
        pin_memory=bool(owner._pin_memory),
        persistent_workers=bool(getattr(owner, "_persistent_workers", False)),
        length=length_of(owner),
        iterable=type(owner._index_sampler).__name__ == "_InfiniteConstantSampler",
    )


def emptiness(owner: Any, record: Loader) -> str:
    """What would make it give no batch at all."""
    sampler = getattr(owner, "batch_sampler", None)
    sampler = getattr(owner, "_index_sampler", None) if sampler is None else sampler
    batch_size, drop_last = record.batch_size, getattr(sampler, "drop_last", getattr(owner, "drop_last", False))
    if record.iterable:
        fewer = f", or after fewer than {batch_size} items (drop_last)" if drop_last and batch_size else ""
        return f"its IterableDataset {record.dataset} ended at once{fewer}"
    items, chooser = record.dataset_length, getattr(sampler, "sampler", sampler)
    chosen = length_of(chooser)
    if items and chosen == 0:
        return f"its {type(chooser).__name__} chooses none of {plural(items, 'item')}"
    count = f"{record.dataset} has {plural(items, 'item')}" if items == 0 else f"{plural(chosen or items or 0, 'item')}"
    size = f", batch_size {batch_size}" if batch_size is not None and items != 0 else ""
    return f"{count}{size}{', drop_last' if drop_last and items != 0 else ''}"


def samples_in(batch: Any, depth: int = 0) -> int | None:
    """Samples in a batch: the first dimension of the first tensor in it; None where there is none.

    Two shapes that a collate function of the user's leaves are no tensors of samples: a list of samples (tuples), and
    their transpose, `tuple(zip(*samples))`, as detection models take it. There the samples are counted.
    """
    if (type(batch) is list or type(batch) is tuple) and batch:  # nearly always, and then of tensors
        shape = getattr(batch[0], "shape", None)
        if shape is not None and len(shape) and depth < _DEPTH:
            return int(shape[0])
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if depth >= _DEPTH:
        return None
    parts: Iterable[Any]
    if isinstance(batch, (list, tuple)):  # asked before Mapping, which is slow to answer
        uncollated = _uncollated(batch) if depth == 0 else None
        if uncollated is not None:
            return uncollated
        parts = batch
    elif isinstance(batch, Mapping):
        parts = batch.values()
    else:
        return None
    for part in parts:
        count = samples_in(part, depth + 1)
        if count is not None:
            return count
    return None


def tensors_in(batch: Any, depth: int = 0) -> int:
    """Tensors in a batch, however it is nested, up to some thousands."""
    if hasattr(batch, "storage_offset"):
        return 1
    if depth >= _DEPTH or not isinstance(batch, list | tuple | Mapping):
        return 0
    parts = batch.values() if isinstance(batch, Mapping) else batch
    return sum(tensors_in(part, depth + 1) for part in itertools.islice(parts, _MOST_PARTS))


def _uncollated(batch: list[Any] | tuple[Any, ...]) -> int | None:
    """Samples in a list of tuples or a tuple of tuples of one length; torch's own collation makes lists of tensors."""
    if not batch or type(batch[0]) is not tuple or type(batch[-1]) is not tuple:
        return None
    if type(batch) is list:
        return len(batch)
    lengths = {len(part) if type(part) is tuple else -1 for part in batch}
    return lengths.pop() if len(lengths) == 1 else None


_ITEMS = ("__getitems__", "__getitem__", "__iter__")
_WITHIN = ("dataset", "datasets", "data_collator", "collate_fn", "transforms", "__wrapped__")


def written(owner: Any) -> Written:
    """Of a DataLoader, or of an iterator made before the run: the dataset may hold another one, and its transforms."""
    dataset = as_written(getattr(owner, "dataset", getattr(owner, "_dataset", None)))
    collate = getattr(owner, "collate_fn", getattr(owner, "_collate_fn", None))
    chooser = getattr(owner, "_index_sampler", None)  # of batches, or of single items
    methods = (getattr(type(held), name, None) for held in _held(dataset) for name in _ITEMS)
    choosers = (chooser, *map(_attributes(chooser).get, ("sampler", "batch_sampler")))
    transforms = (_attributes(held).get(name) for held in _held(dataset) for name in TRANSFORMS)
    return Written(
        items=next(filter(None, map(_spot, methods)), None),
        transform=next(filter(None, map(_callable_spot, transforms)), None),
        collate=_callable_spot(collate),
        sampler=next(filter(None, (_spot(getattr(type(each), "__iter__", None)) for each in choosers)), None),
    )


def _callable_spot(call: Any) -> Spot | None:
    """A function of the user's, a method, an object that is called, or one of them within it."""
    spots = (_spot(held) or _spot(getattr(type(held), "__call__", None)) for held in _held(call))  # noqa: B004
    return next(filter(None, spots), None)


def _held(thing: Any, depth: int = 0) -> Iterator[Any]:
    if thing is None or depth > _DEPTH:
        return
    yield thing
    if isinstance(thing, functools.partial):
        yield from _held(thing.func, depth + 1)
    for name in _WITHIN:
        inner = _attributes(thing).get(name)
        for one in inner[:_DEPTH] if isinstance(inner, list | tuple) else (inner,):
            yield from _held(one, depth + 1)


def _attributes(thing: Any) -> dict[str, Any]:
    """What it holds by itself: a property would run code of the user's."""
    held: dict[str, Any] = getattr(thing, "__dict__", {})
    return held


def _spot(function: Any) -> Spot | None:
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    if code is None or not is_users_file(code.co_filename):
        return None
    return code.co_filename, code.co_firstlineno, code.co_qualname


class Workers:
    """What a run learns of its DataLoaders' workers. Times are ns since the run began."""

    def __init__(self) -> None:
        self._cannot_start: Missing | None = None
        self._death: Missing | None = None

    def meet(self, loader: Any, now_ns: int) -> None:
        """A loader is about to make an iterator: say so, once, where its workers cannot start."""
        why = cannot_start(loader) if self._cannot_start is None else None
        if why is None:
            return
        self._cannot_start = Missing("data from the DataLoader's workers", why, now_ns, "workers")
        with suppress(OSError, ValueError, AttributeError):  # a standard error that is closed or not there
            sys.stderr.write(f"gpulab: {why}.\n")

    def fail(self, error: str, now_ns: int, iterator: Any = None) -> None:
        """Something failed with this error: perhaps a worker died. The first death counts."""
        how = death(error, iterator) if self._death is None else None
        if how is not None:
            self._death = Missing("data from a DataLoader worker", how, now_ns, "loader")

    def missing(self, *, fed: bool) -> tuple[Missing, ...]:
        """What they did not give. `fed`: the run had batches; without a death it speaks against what was predicted."""
        predicted = self._cannot_start if self._death is not None or not fed else None
        return tuple(m for m in (self._death, predicted) if m is not None)


@contextmanager
def deaths_unheard() -> Iterator[None]:
    """Inside, torch does not raise that a worker died: it would do so in the middle of our own work.

    Its handler looks after all workers, those of earlier cells too, whenever any child process ends, and ours does at
    the end of a run. A loader that lacks a worker says so itself at its next batch.
    """
    heard = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    if not callable(heard) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            heard(number, frame)
        except RuntimeError as e:
            if death(str(e)) is None:
                raise

    signal.signal(signal.SIGCHLD, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is handle:
            signal.signal(signal.SIGCHLD, heard)


def death(error: str, iterator: Any = None) -> str | None:
    """Which worker died and how, where torch's message `error` tells of one; None for any other error.

    `iterator` is the DataLoader's, whose processes know more than the message.
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
    """Why the workers that a DataLoader is about to start will not get its data; None where nothing speaks against it.

    A worker that is not forked imports what it needs by name, and finds nothing of a notebook: there `__main__` is no
    file. Looks from the outside, starts and pickles nothing.
    """
    if not getattr(loader, "num_workers", 0) or getattr(loader, "_iterator", None) is not None:
        return None
    method = start_method(loader)
    if method == "fork" or main_can_be_imported():
        return None
    try:
        names = defined_in_main(loader)
    except Exception:  # a user's object may refuse to be looked at
        return None
    if not names:
        return None
    return (
        f"the DataLoader's workers (start method {method}) will not find {', '.join(names)}: defined in a notebook, "
        "which they cannot import. Move it to a .py file and import it, or use num_workers=0"
    )
