"""When the training loop asks a DataLoader, and when it is answered: the time between is the wait for data."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Literal, Protocol

from gpulab.torch_hooks.patching import replaced

Answer = Literal["batch", "iterator", "end"]


class Asking(Protocol):
    """Who hears it, on the training thread. It reads the clock itself. `asked` may raise, to stop the loop."""

    def asked(self, loader: int, owner: Any, fresh: bool) -> None:
        """A loader is about to be asked, `fresh`: for an iterator; `owner` is the DataLoader or its iterator."""

    def answered(self, answer: Answer, batch: Any) -> None:
        """A loader gave a batch, or its end."""

    def failed(self, owner: Any, error: RuntimeError) -> None:
        """An iterator raises this instead of giving a batch."""


class Keys:
    """One number for a DataLoader and all its iterators, which share their index sampler; never one for two loaders."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[Callable[[], Any], int]] = {}
        self._count = 0

    def of(self, owner: Any) -> int:
        """The number of the loader that `owner` is, or of the one whose iterator it is."""
        sampler = getattr(owner, "_index_sampler", None)
        shared = sampler if sampler is not None else owner
        entry = self._numbers.get(id(shared))
        if entry is not None and entry[0]() is shared:  # an id returns when its object is gone
            return entry[1]
        self._count += 1
        self._numbers[id(shared)] = (_reference(shared), self._count)
        return self._count


def _reference(target: Any) -> Callable[[], Any]:
    """Weak where possible; a list of batches cannot be referred to weakly and is kept for the run."""
    try:
        return weakref.ref(target)
    except TypeError:
        return lambda: target


@contextmanager
def wait_hooks(loop: Asking, thread: int) -> Iterator[None]:
    """Tell `loop` of each request of this thread to a DataLoader. Needs torch to be imported."""
    from torch.utils.data import dataloader

    key, asked, answered = Keys().of, loop.asked, loop.answered

    def wrap_iter(original: Any) -> Any:
        @functools.wraps(original)
        def __iter__(self: Any) -> Any:
            if get_ident() != thread:
                return original(self)
            try:
                asked(key(self), self, True)
                return original(self)
            finally:
                answered("iterator", None)

        return __iter__

    def wrap_next(original: Any) -> Any:
        @functools.wraps(original)
        def __next__(self: Any) -> Any:
            if get_ident() != thread:
                return original(self)
            answer: Answer = "end"
            batch = None
            try:
                asked(key(self), self, False)
                batch = original(self)
                answer = "batch"
                return batch
            except RuntimeError as e:
                loop.failed(self, e)
                raise
            finally:
                answered(answer, batch)

        return __next__

    with (
        replaced(dataloader.DataLoader, "__iter__", wrap_iter),
        replaced(dataloader._BaseDataLoaderIter, "__next__", wrap_next),
    ):
        yield
