"""What a DataLoader is and what it gave, and where the user's code that makes a batch is written: nothing is changed.

Workers run that code in processes of their own, where no stack is sampled: then its lines are the nearest to the cause.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from gpulab.capture.dataloader.fetch_clock import TRANSFORMS
from gpulab.capture.stacks.stack import Spot
from gpulab.formatting import plural
from gpulab.knobs.observe.describe import as_written, length_of, loader_record
from gpulab.run import Loader
from gpulab.user_code import is_users_file

_DEPTH = 4
_MOST_PARTS = 1_000
LOADERS_KEPT = 32


class Written(Struct, frozen=True):
    """Lines of the user's code that makes batches; None where it is a library's."""

    items: Spot | None = None
    transform: Spot | None = None
    collate: Spot | None = None


NOWHERE = Written()


def written(owner: Any) -> Written:
    """Of a DataLoader, or of an iterator made before the run."""
    dataset = as_written(getattr(owner, "dataset", getattr(owner, "_dataset", None)))
    collate = getattr(owner, "collate_fn", getattr(owner, "_collate_fn", None))
    return Written(items_spot(dataset), transform_spot(dataset), callable_spot(collate))


class Loaders:
    """The DataLoaders met in a run, by the hooks' number, the newest only; `record` is the one that feeds the steps."""

    def __init__(self) -> None:
        self.record: Loader | None = None
        self._loaders: dict[int, Loader] = {}
        self._tensors: dict[int, int] = {}
        self._fed: set[int] = set()
        self._written: dict[int, Written] = {}
        self.met = False  # any that could be described
        self.emptiness = ""  # of a loader that has ended without a batch; empty where one gave a batch
        self._why_empty: dict[int, str] = {}

    def meet(self, number: int, owner: Any, feeder: int | None) -> Loader | None:
        """A loader is asked for the first time, or anew. `feeder` is the number of the one that feeds the steps."""
        described = describe_loader(owner)
        if described is None:
            return None
        if len(self._loaders) >= LOADERS_KEPT:
            self._loaders = {n: loader for n, loader in self._loaders.items() if n == feeder}
        self._loaders[number] = described
        self._why_empty[number] = emptiness(owner, described)
        self.met = True
        self._written = {n: spots for n, spots in self._written.items() if n in self._loaders} | {
            number: written(owner)
        }
        return described

    def written(self, number: int | None) -> Written:
        """Where the code of that loader's batches is written."""
        return self._written.get(number, NOWHERE) if number is not None else NOWHERE

    def ended(self, number: int) -> None:
        """The loader of that number has no more batch."""
        if not self._tensors:
            self.emptiness = self._why_empty.get(number, "")

    def gave(self, number: int, batch: Any) -> None:
        """The loader of that number has given this batch; the first one tells of how many tensors they are."""
        self.emptiness = ""
        if number not in self._tensors and len(self._tensors) < LOADERS_KEPT:
            self._tensors[number] = tensors_in(batch)

    @property
    def remade(self) -> bool:
        """Whether several loaders that are alike fed the steps one after the other."""
        return sum(self._loaders.get(number) == self.record for number in self._fed) > 1

    def tensors(self, number: int | None) -> int | None:
        """In a batch of that loader; None where it gave none."""
        return self._tensors.get(number) if number is not None else None

    def feeds(self, number: int) -> Loader | None:
        """This one feeds the steps; None where nothing is known of it."""
        loader = self._loaders.get(number)
        self._fed.add(number)
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
_CALL = "__call__"


def items_spot(dataset: Any) -> Spot | None:
    """The user's method that gives an item, of the dataset or of one that it holds (Subset, ConcatDataset)."""
    for held in _held(dataset):
        for name in _ITEMS:
            spot = _spot(getattr(type(held), name, None))
            if spot is not None:
                return spot
    return None


def transform_spot(dataset: Any) -> Spot | None:
    """The user's transform, where the dataset holds it as such."""
    for held in _held(dataset):
        for name in TRANSFORMS:
            spot = callable_spot(_attributes(held).get(name))
            if spot is not None:
                return spot
    return None


def callable_spot(call: Any) -> Spot | None:
    """A function of the user's, a method, an object that is called, or one of them within it."""
    for held in _held(call):
        spot = _spot(held) or _spot(getattr(type(held), _CALL, None))
        if spot is not None:
            return spot
    return None


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
