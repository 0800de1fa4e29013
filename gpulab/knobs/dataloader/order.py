"""Has a copy of a DataLoader ask its sampler as often, and draw a seed when, the user's loader would have.

torch begins an epoch in one of three ways: without workers it asks the sampler for its order and draws a seed from the
random numbers; with workers it asks, draws and asks again, and goes by the second order; workers that live on are only
asked for. A sampler that draws when it is asked, or as it goes, gives the same order only if all of this is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Generator
    from torch.utils.data import DataLoader


@dataclass(frozen=True, slots=True)
class Beginning:
    """How torch begins an epoch: `asks` the sampler so often, and after the first time draws a seed, or not."""

    asks: int
    draws: bool


def beginning(loader: DataLoader[Any], *, goes_on: bool) -> Beginning:
    """Of this loader; `goes_on`: its workers live already."""
    if goes_on:
        return Beginning(1, False)
    return Beginning(2 if loader.num_workers else 1, True)


class Order:
    """In place of the sampler while an epoch of a copy begins in `our` way instead of `theirs`."""

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
        """torch draws it as soon as we have returned."""
        yield from self._sampler


def draw_seed(generator: Generator | None) -> None:
    """As torch draws the seed of an epoch's workers."""
    import torch

    torch.empty((), dtype=torch.int64).random_(generator=generator)


@contextmanager
def ordered(loader: DataLoader[Any], order: Order | None) -> Iterator[None]:
    """Let the iterators that are made of `loader` inside ask `order`."""
    if order is None:
        yield
        return
    attributes = vars(loader)
    name = "sampler" if attributes["batch_sampler"] is None else "batch_sampler"
    sampler = attributes[name]
    attributes[name] = order
    try:
        yield
    finally:
        attributes[name] = sampler


@contextmanager
def ordered_anew(iterator: Any, order: Order) -> Iterator[None]:
    """Let an iterator whose workers live on ask `order` when it begins anew inside."""
    sampler = iterator._index_sampler
    iterator._index_sampler = order
    try:
        yield
    finally:
        iterator._index_sampler = sampler
