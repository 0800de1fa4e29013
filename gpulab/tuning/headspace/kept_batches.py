"""The ideal DataLoader: a few batches, already on the device, given out again and again, as if loading cost nothing.

They are real batches of the user's own loader; each is copied when it is given out, for a loop may change what it gets.
The loader's sampler is still asked, so that an epoch has as many batches as it has. Workers are not started where the
loader can do without; where it cannot, they stand still once they have loaded ahead.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from gpulab.capture.dataloader.facts import samples_in
from gpulab.knobs.dataloader.changed_loader import overriding
from gpulab.knobs.knob import KnobEffects
from gpulab.torch_hooks.patching import replaced

KEPT = 3  # batches of each loader: they are loaded before the first step
_DEPTH = 8


@contextmanager
def kept_batches(device: str) -> Iterator[None]:
    """Inside, every DataLoader iterated on this thread gives batches kept on `device`, as torch names it."""
    from torch.utils.data import dataloader

    kept = _Kept(device)
    several, single = dataloader._MultiProcessingDataLoaderIter, dataloader._SingleProcessDataLoaderIter
    with (
        overriding("num_workers", 0, KnobEffects()),
        replaced(several, "_next_data", kept.wrap),
        replaced(single, "_next_data", kept.wrap),
    ):
        yield


class _Kept:
    """By the sampler that a loader and all its iterators share."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._thread = get_ident()
        self._batches: weakref.WeakKeyDictionary[Any, dict[int | None, list[Any]]] = weakref.WeakKeyDictionary()
        self._given: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by iterator

    def wrap(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """In place of the method that gets an iterator's next batch."""

        @functools.wraps(original)
        def _next_data(iterator: Any) -> Any:
            if get_ident() != self._thread:
                return original(iterator)
            try:
                kept = self._batches.setdefault(iterator._index_sampler, {})
            except TypeError:  # a list of batches
                return original(iterator)
            return self._next(iterator, kept, original)

        return _next_data

    def _next(self, iterator: Any, kept: dict[int | None, list[Any]], original: Callable[[Any], Any]) -> Any:
        if not kept:
            return self._load(iterator, kept, original)
        given = self._given.get(iterator, 0)
        self._given[iterator] = given + 1
        first = next(iter(kept.values()))
        if given < 0:  # those that were loaded for it at its beginning
            return _copied(first[given])
        index = iterator._next_index()  # raises StopIteration at the end of the epoch
        size = _size(index)
        if size not in kept and size is not None and hasattr(iterator, "_dataset_fetcher"):
            kept[size] = [_copied(iterator._dataset_fetcher.fetch(index), self._device)]  # the last of an epoch
        batches = kept.get(size, first)
        return _copied(batches[given % len(batches)])

    def _load(self, iterator: Any, kept: dict[int | None, list[Any]], original: Callable[[Any], Any]) -> Any:
        """The first batches of a loader, at its first request."""
        loaded: list[Any] = []
        for _ in range(KEPT):
            try:
                loaded.append(_copied(original(iterator), self._device))
            except StopIteration:
                if not loaded:
                    raise
                break
        kept[_usual_size(iterator, loaded[0])] = loaded
        self._given[iterator] = 1 - len(loaded)
        return _copied(loaded[0])


def _size(index: Any) -> int | None:
    return len(index) if isinstance(index, list | tuple) else None


def _usual_size(iterator: Any, batch: Any) -> int | None:
    if not getattr(iterator, "_auto_collation", False):
        return None
    size = getattr(iterator._index_sampler, "batch_size", None)
    return size if isinstance(size, int) else samples_in(batch)


def _copied(batch: Any, device: str | None = None) -> Any:
    """A copy on the device, or where it is; of what is neither a tensor nor made of tensors a shallow one."""
    import torch

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.clone() if device is None else leaf.to(device, copy=True)
        if not callable(getattr(leaf, "to", None)):
            return leaf
        return copy.copy(leaf) if device is None else copy.copy(leaf).to(device)

    return _mapped(batch, copied)


def _mapped(thing: Any, change: Callable[[Any], Any], depth: int = 0) -> Any:
    """Containers of the kinds that torch's collation makes, made anew; everything else through `change`."""
    if depth >= _DEPTH or isinstance(thing, str | bytes):
        return thing
    if isinstance(thing, Mapping) and not callable(getattr(thing, "to", None)):
        mapping = copy.copy(thing)
        if hasattr(mapping, "update"):
            mapping.update({key: _mapped(value, change, depth + 1) for key, value in thing.items()})
        return mapping
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(_mapped(part, change, depth + 1) for part in thing))
    if isinstance(thing, list | tuple):
        return type(thing)(_mapped(part, change, depth + 1) for part in thing)
    return change(thing)
