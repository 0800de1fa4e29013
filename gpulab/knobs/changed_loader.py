"""Iterates a changed copy of a DataLoader instead of the user's own, while one of its options is overridden.

`DataLoader.__iter__` and `__len__` are replaced at the class, so loaders of earlier cells and of libraries are covered,
evaluation loaders too. A loader has one copy until the overrides change: its epochs are alike and its workers may
persist. Apart from the overridden options, what follows from them, and sometimes its random generator, the copy
shares everything with the user's loader, which is never changed.

The order of the data stays the same, with two exceptions due to workers: a dataset that draws random numbers draws
them in another process; and a sampler that draws during the epoch is read ahead, so after an interrupted epoch it has
drawn more.

When the overrides change or end, the workers of all iterators of copies are shut down.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from threading import get_ident
from typing import TYPE_CHECKING, Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from gpulab.knobs.description import WeakTable, length_of, observed_loader
from gpulab.knobs.knob import KnobEffects
from gpulab.knobs.observation import ObservedLoader
from gpulab.knobs.variables import setting_names
from gpulab.patching.attributes import replaced

if TYPE_CHECKING:
    from torch import Generator
    from torch.utils.data import BatchSampler, DataLoader

# In the order of application: a later option may depend on an earlier one
Option = Literal["num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "batch_size", "dataset"]
Changes = dict[str, Any]  # attributes of the copy that differ from the user's loader
Iterate = Callable[[Any], Any]
Reason = Callable[[ObservedLoader], str | None]

PREFETCH_OF_TORCH = 2  # batches per worker, torch's default
OWN_AFFAIR = (
    "the dataset is an IterableDataset, which orders its data and shards them across workers itself: "
    "the run might see different data"
)

_OWN_WAYS = ("_get_iterator", "_index_sampler", "_auto_collation")  # a class may override these to make its iterators
_END_WAIT_S = 5.0


class Inapplicable(Exception):
    """A loader keeps this option unchanged; the message gives the reason, for the user."""


class Override(Struct, frozen=True, eq=False):
    """One option and its new value; for "dataset" a function of the loader and its number of workers.

    `reason` returns why a loader cannot have the value; None if it can.
    """

    option: Option
    value: Any
    effects: KnobEffects
    reason: Reason


def own_affair(loader: ObservedLoader) -> str | None:
    """Why options that decide which process loads the data cannot be changed; None if they can."""
    return OWN_AFFAIR if loader.record.iterable else None


@contextmanager
def overriding(option: Option, value: Any, effects: KnobEffects, reason: Reason = own_affair) -> Iterator[None]:
    """Override an option of every DataLoader that this thread iterates inside; of nested overrides the inner one wins.

    `effects` counts "loaders" that were changed, "loaders unchanged" that had the value already, "epochs" and
    "worker starts"; "worker processes" is the largest number alive. `effects` also has the reason for each loader that
    could not be changed. Contexts may be left in any order.
    """
    thread = get_ident()
    session = _sessions.get(thread) or _Session(thread)
    override = Override(option, value, effects, reason)
    with ExitStack() as undo:
        undo.callback(session.remove, override)
        session.add(override)
        yield


class _Session:
    """The overrides of one thread, and the copies of loaders made for them."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._process = os.getpid()
        self._overrides: list[Override] = []
        self._copies: WeakTable[_Copy] = WeakTable()
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._patches = ExitStack()

    def add(self, override: Override) -> None:
        self._end_copies()
        self._overrides.append(override)
        if len(self._overrides) == 1:
            _sessions[self._thread] = self
            self._patch()

    def remove(self, override: Override) -> None:
        if override in self._overrides:
            self._overrides.remove(override)
        with ExitStack() as undo:
            undo.callback(self._end_copies)
            if not self._overrides:
                _sessions.pop(self._thread, None)
                undo.callback(self._patches.close)

    @property
    def _is_active(self) -> bool:
        """Whether the caller runs on the session's thread, and not in a worker process forked from it."""
        return bool(self._overrides) and get_ident() == self._thread and os.getpid() == self._process

    def _patch(self) -> None:
        from torch.utils.data import DataLoader
        from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

        def wrap_iter(original: Iterate) -> Iterate:
            def __iter__(loader: DataLoader[Any]) -> Any:
                copy = self._copy_of(loader) if self._is_active else None
                return original(loader) if copy is None else self._iterate(copy, loader, original)

            return __iter__

        def wrap_len(original: Callable[[Any], int]) -> Callable[[Any], int]:
            def __len__(loader: DataLoader[Any]) -> int:
                length = self._overridden_length(loader) if self._is_active else None
                return original(loader) if length is None else length

            return __len__

        def wrap_init(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
            def __init__(iterator: Any, loader: DataLoader[Any]) -> None:
                copy = next((copy for copy in self._copies.values() if copy.loader is loader), None)
                if copy is None:
                    original(iterator, loader)
                else:
                    self._make(copy, iterator, original)

            return __init__

        self._patches.enter_context(replaced(_SingleProcessDataLoaderIter, "__init__", wrap_init))
        self._patches.enter_context(replaced(_MultiProcessingDataLoaderIter, "__init__", wrap_init))
        self._patches.enter_context(replaced(DataLoader, "__iter__", wrap_iter))
        self._patches.enter_context(replaced(DataLoader, "__len__", wrap_len))

    def _in_force(self) -> list[Override]:
        """The innermost override of each option, in the order in which they are applied."""
        inner = {o.option: o for o in self._overrides}
        return [inner[option] for option in get_args(Option) if option in inner]

    def _iterate(self, copy: _Copy, loader: DataLoader[Any], original: Iterate) -> Any:
        for override in self._in_force():
            override.effects.count("epochs")
        return copy.iterate(loader, original)

    def _make(self, copy: _Copy, iterator: Any, original: Callable[[Any, Any], None]) -> None:
        """Make the iterator of a copy; recorded first, because a failure in the middle leaves workers running."""
        self._iterators.add(iterator)
        copy.make(iterator, original)
        workers = getattr(iterator, "_workers", ())
        if not workers:
            return
        alive = sum(worker.is_alive() for worker in workers)
        for override in self._in_force():
            counts = override.effects.counts
            override.effects.count("worker starts")
            counts["worker processes"] = max(alive, counts["worker processes"])

    def _overridden_length(self, loader: DataLoader[Any]) -> int | None:
        sizes = [override.value for override in self._in_force() if override.option == "batch_size"]
        batches = rebatched(loader, sizes[0]) if sizes else None
        return None if batches is None else len(batches)

    def _copy_of(self, loader: DataLoader[Any]) -> _Copy | None:
        """The loader's one copy; None if nothing is changed."""
        copy = self._copies.get(loader)
        if copy is None:
            copy = _Copy(loader, self._changes(loader))
            self._copies.put(loader, copy)
        return copy if copy.changes else None

    def _changes(self, loader: DataLoader[Any]) -> Changes:
        changes: Changes = {}
        accepted: list[Override] = []
        observed = observed_loader(loader)
        for override in self._in_force():
            try:
                if why := override.reason(observed):
                    raise Inapplicable(why)
                changes |= _change(loader, override, observed.record.num_workers)
            except Inapplicable as e:
                override.effects.refuse(f"the DataLoader of {type(loader.dataset).__name__} was not changed: {e}")
                continue
            accepted.append(override)
            workers = changes.get("num_workers", loader.num_workers)
            observed = replace(observed, record=replace(observed.record, num_workers=workers))
        changes = settled(loader, changes)
        for override in accepted:
            attribute = "batch_sampler" if override.option == "batch_size" else override.option
            override.effects.count("loaders" if attribute in changes else "loaders unchanged")
        return changes

    def _end_copies(self) -> None:
        """Forget the copies and end the workers of all their iterators, interrupted ones too."""
        with ExitStack() as ending:
            for iterator in list(self._iterators):
                ending.callback(_end_workers, iterator)
            self._copies.clear()
            self._iterators.clear()


_sessions: dict[int, _Session] = {}


class _Copy:
    def __init__(self, users: DataLoader[Any], changes: Changes) -> None:
        from torch.utils.data import DataLoader

        own_way = any(getattr(type(users), name) is not getattr(DataLoader, name) for name in _OWN_WAYS)
        self.loader: DataLoader[Any] = object.__new__(type(users) if own_way else DataLoader)
        self.changes = changes
        self._begun = False
        self._order: Order | None = None
        vars(self.loader).update(vars(users), **changes, _iterator=None)

    def iterate(self, users: DataLoader[Any], original: Iterate) -> Any:
        """The copy's iterator for one more epoch."""
        current = {k: v for k, v in vars(users).items() if k != "_iterator"}
        vars(self.loader).update(current, **self.changes)
        running = self.loader._iterator if _persists(self.loader) else None
        theirs = beginning(users, goes_on=_persists(users) and (self._begun or users._iterator is not None))
        ours = beginning(self.loader, goes_on=running is not None)
        if ours.draws and not theirs.draws:
            import torch

            vars(self.loader)["generator"] = torch.Generator().manual_seed(0)
        self._begun = True
        self._order = Order(self.loader._index_sampler, theirs, ours, users.generator)
        # the iterator that owns the workers: this one or a wrapped one; None if there is none or it is hidden
        inner = vars(running).values() if hasattr(running, "__dict__") else ()
        real = next((i for i in (running, *inner) if hasattr(i, "_shutdown_workers")), None)
        with nullcontext() if real is None else setting_names(vars(real), {"_index_sampler": self._order}):
            return original(self.loader)

    def make(self, iterator: Any, original: Callable[[Any, Any], None]) -> None:
        sampler = self.loader._index_sampler
        with ordered(self.loader, self._order):
            original(iterator, self.loader)
        if iterator._index_sampler is self._order:
            iterator._index_sampler = sampler


def _persists(loader: DataLoader[Any]) -> bool:
    return loader.persistent_workers and loader.num_workers > 0


def _end_workers(iterator: Any) -> None:
    if not hasattr(iterator, "_workers"):  # it failed before it had workers
        return
    workers = list(iterator._workers)
    try:
        iterator._shutdown_workers()
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
                worker.join(_END_WAIT_S)


# -- what an override changes ------------------------------------------------------------------------------------------


def _change(loader: DataLoader[Any], override: Override, workers: int) -> Changes:
    """The attributes of a copy that one override changes. Raises Inapplicable."""
    if override.option == "dataset":
        return {"dataset": override.value(loader, workers)}
    if override.option != "batch_size":
        return {override.option: override.value}
    batches = rebatched(loader, override.value)
    if batches is None:
        raise Inapplicable(f"its sampler gives fewer items than a batch of {override.value}")
    # accelerate's loaders have a batch_sampler instead of a size
    return {"batch_sampler": batches, **({} if loader.batch_size is None else {"batch_size": override.value})}


def rebatched(loader: DataLoader[Any], size: int) -> BatchSampler | None:
    """Batches of that size from the same sampler.

    None if the batches are not made by torch's own BatchSampler, or the sampler has fewer items than one batch.
    """
    from torch.utils.data import BatchSampler, IterableDataset

    sampler = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or type(sampler) is not BatchSampler:
        return None
    if sampler.batch_size == size:
        return sampler
    length = length_of(sampler.sampler)
    return None if length is not None and size > length else BatchSampler(sampler.sampler, size, sampler.drop_last)


def settled(loader: DataLoader[Any], changes: Changes) -> Changes:
    """The changes with their consequences for other options, without attributes that keep their value."""
    workers = changes.get("num_workers", loader.num_workers)
    if not workers and loader.num_workers:
        changes.update(prefetch_factor=None, persistent_workers=False, timeout=0)  # torch accepts no other
    elif workers and changes.get("prefetch_factor", loader.prefetch_factor) is None:
        changes["prefetch_factor"] = PREFETCH_OF_TORCH
    return {name: value for name, value in changes.items() if _differs(getattr(loader, name), value)}


def _differs(old: object, new: object) -> bool:
    plain = isinstance(new, bool | int | float | None)
    return old != new if plain else old is not new


# -- the order of the data ---------------------------------------------------------------------------------------------


class Beginning(Struct, frozen=True):
    """How torch begins an epoch: `asks` counts its calls of `iter(sampler)`; `draws`: a seed is drawn after the first.

    Without workers torch calls `iter` once and draws a seed. With new workers it calls `iter`, draws, and calls `iter`
    again, and uses the second order. With persistent workers already running it only calls `iter` once. A sampler that
    draws random numbers gives the same order only if this sequence is the same.
    """

    asks: int
    draws: bool


def beginning(loader: DataLoader[Any], *, goes_on: bool) -> Beginning:
    """How torch begins an epoch of this loader; `goes_on`: its persistent workers are running."""
    if goes_on:
        return Beginning(1, False)
    return Beginning(2 if loader.num_workers else 1, True)


class Order:
    """Replaces the sampler while an epoch of a copy begins: torch acts as in `ours`, the sampler sees `theirs`."""

    def __init__(self, sampler: Any, theirs: Beginning, ours: Beginning, generator: Generator | None) -> None:
        self._sampler = sampler
        self._theirs, self._ours = theirs, ours
        self._generator = generator
        self._times = 0
        self._first: Any = None

    def __iter__(self) -> Any:
        self._times += 1
        if self._times > 1:
            return self._first if self._theirs.asks == 1 else iter(self._sampler)
        self._first = iter(self._sampler)
        if self._theirs.draws and not self._ours.draws:
            draw_seed(self._generator)
            return self._first if self._theirs.asks == 1 else iter(self._sampler)
        if self._theirs.asks > self._ours.asks:
            return self._after_the_seed()
        return self._first

    def _after_the_seed(self) -> Iterator[Any]:
        """A generator, so that the sampler is asked only after torch has drawn the seed."""
        yield from self._sampler


def draw_seed(generator: Generator | None) -> None:
    """Draw as torch draws the seed of an epoch's workers."""
    import torch

    torch.empty((), dtype=torch.int64).random_(generator=generator)


@contextmanager
def ordered(loader: DataLoader[Any], order: Order | None) -> Iterator[None]:
    """Inside, iterators made from `loader` use `order` instead of the sampler."""
    if order is None:
        yield
        return
    name = "sampler" if vars(loader)["batch_sampler"] is None else "batch_sampler"
    with setting_names(vars(loader), {name: order}):  # bypasses the setter of DataLoader, which refuses a new sampler
        yield
