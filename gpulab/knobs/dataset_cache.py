"""The whole dataset in memory, loaded once before the loop: what a run would be like if loading items cost nothing.

A dataset that gives another item each time (random augmentation) or draws random numbers for it is refused: a cache
would freeze it. So is one that would take more than 25 % of the free memory or more than 60 s to load, by its first
items. Random numbers are as before after the loading. Items are loaded when a loader is first iterated and kept by the
knob until `forget` or until the user's dataset is gone; at each new application a few are loaded anew and compared.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from gpulab.devices.cgroups import free_host_bytes
from gpulab.formatting import duration, number, percent, size, while_s
from gpulab.knobs.changed_loader import OWN_AFFAIR, Left, overriding
from gpulab.knobs.in_memory_dataset import served_for
from gpulab.knobs.knob import CodeEdit, Kind, Knob, KnobEffects, Value, Verification
from gpulab.knobs.loader_options import NO_LOADER, why_untouched
from gpulab.knobs.observation import Observation
from gpulab.knobs.preparation import doing
from gpulab.run import Run
from gpulab.torch_hooks.randomness import Randomness, preserving_randomness

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

MEMORY_SHARE = 0.25  # of the free memory
LIMIT_S = 60.0
PROBED = 16  # items, loaded twice: an augmentation that happens every other time is missed once in 65,000
PROBE_LIMIT_S = 4.0
CHECKED_AGAIN = 3  # items, at each application
_DEPTH = 8  # of containers in an item
CHUNK = 64  # items at a time, for a dataset that loads several at once


Reference = weakref.ref[Any]  # to a dataset: no id of one that is gone is taken for it


class DatasetCache(Knob):
    """Serve the items of every map-style dataset from memory."""

    name = "cache"
    title = "Dataset cache"
    help = "Loads the whole dataset into memory before the loop: shows what loading and decoding cost"
    kind: Kind = "DataLoader option"
    lesson = "03_starving_gpu"
    options: tuple[Value, ...] = (False, True)
    helps_against: Mapping[str, int] = {"data_starved": 3, "cpu_preprocessing": 2, "storage_bound": 3}

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Reference, list[Any]]] = {}  # all items of datasets
        self._left: dict[int, tuple[Reference, str]] = {}  # datasets looked at before, and what spoke against it

    def value_in(self, observation: Observation) -> Value | None:
        """Off, wherever there is a loader: a baseline has none."""
        return None if observation.loader is None else False

    def refuses(self, observation: Observation, value: Value) -> str | None:
        """What can be told without loading an item; the rest is in the effects of the run."""
        if observation.loader is None:
            return NO_LOADER
        if not value:
            return None
        if observation.loader.record.iterable:
            return OWN_AFFAIR
        return "the dataset has no length" if observation.loader.record.dataset_length is None else None

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        """Serve from memory the items of each dataset whose loader is iterated inside."""
        effects = KnobEffects()
        cached = _Application(self._kept, self._left, effects).cached
        with overriding("dataset", cached, effects) if value else nullcontext():
            yield effects

    def forget(self) -> None:
        self._kept.clear()
        self._left.clear()

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        """By the dataset of the loader that fed the steps."""
        if not value:
            return Verification("no effect", "the baseline has no cache")
        if not effects.counts.get("loaders"):
            return Verification("no effect", why_untouched(self.name, value, effects))
        if run.loader is None:
            return Verification("cannot tell", "could not identify which DataLoader fed the steps")
        name = run.loader.dataset
        if not effects.counts.get(_from_memory(name)):
            return Verification("no effect", "the steps were fed by a different dataset")
        if effects.counts.get(_unchanged(name)):
            return Verification("cannot tell", f"one {name} was served from memory, another was not")
        return Verification("took effect", f"{run.loader.dataset_length} items were served from memory")

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        if not value:
            return CodeEdit("")
        kind = "Dataset" if observation.loader is None else observation.loader.record.dataset
        return CodeEdit(
            f"# before the DataLoader is built; write the name of your {kind} in place of `dataset`\n"
            "dataset = [dataset[i] for i in range(len(dataset))]",
            "DataLoader",
            "dataset",
            "[dataset[i] for i in range(len(dataset))]",
            "[items[i] for items in [dataset] for i in range(len(items))]",
            "cache=on",
        )


class _Application:
    """The cache as it is applied once: for one block."""

    def __init__(
        self,
        kept_items: dict[int, tuple[Reference, list[Any]]],
        left: dict[int, tuple[Reference, str]],
        effects: KnobEffects,
    ) -> None:
        self._kept = kept_items
        self._left = left
        self._effects = effects
        self._trusted: set[int] = set()  # datasets whose items were looked at in this application

    def cached(self, loader: DataLoader[Any], workers: int) -> object:
        """A dataset that serves the items of the loader's from memory. Raises Left."""
        name = type(loader.dataset).__name__
        try:
            items = self._looked_up(loader, workers)
        except Left:
            self._effects.count(_unchanged(name))
            raise
        self._effects.count(_from_memory(name))
        return served_for(loader, items)

    def _looked_up(self, loader: DataLoader[Any], workers: int) -> list[Any]:
        dataset = loader.dataset
        before = self._left.get(id(dataset))
        if before is not None and before[0]() is dataset:
            raise Left(before[1])
        began = time.perf_counter()
        try:
            with preserving_randomness():
                return self._items(_Loading(dataset), copies=1 + _copies(loader, workers))
        except Left as why:
            with suppress(TypeError):  # it cannot be referred to weakly
                self._left[id(dataset)] = weakref.ref(dataset), str(why)
            raise
        finally:
            doing.words = ""
            self._effects.preparation_s += time.perf_counter() - began

    def _items(self, load: _Loading, copies: int) -> list[Any]:
        key = id(load.dataset)
        reference, items = self._kept.get(key, (None, []))
        if reference is None or reference() is not load.dataset:
            items = self._fill(load, copies)
        elif key not in self._trusted and not _still_true(load, items):
            del self._kept[key]
            self._effects.note("the dataset's items had changed, so the cache was refilled")
            items = self._fill(load, copies)
        self._trusted.add(key)
        return items

    def _fill(self, load: _Loading, copies: int) -> list[Any]:
        began = time.perf_counter()
        dataset = load.dataset
        free = free_host_bytes()
        if free is None:
            raise Left("free memory cannot be read on this system")
        limit = int(MEMORY_SHARE * free / copies)
        load.probe(limit)
        items, size_bytes = load.all(limit)
        key = id(dataset)

        def drop(ended: Reference) -> None:
            if key in self._kept and self._kept[key][0] is ended:
                del self._kept[key]

        self._kept[key] = _reference(dataset, drop), items
        self._effects.note(
            f"{len(items)} items of {type(dataset).__name__} ({size(size_bytes)}) were loaded into memory in "
            f"{duration((time.perf_counter() - began) * 1e6)} before the loop"
        )
        return items


class _Loading:
    """Loads items of one dataset the way torch's loader would."""

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, list | tuple):
            raise Left("the items are already in memory")
        self.dataset = dataset
        self._several = getattr(dataset, "__getitems__", None)
        try:
            self.length = len(dataset)
        except Exception:  # a user's __len__ may raise anything
            raise Left("the dataset has no length") from None

    def items(self, indices: list[int]) -> list[Any]:
        """These items. Raises Left where the dataset cannot load them."""
        try:
            items = self._several(indices) if self._several else [self.dataset[i] for i in indices]
        except Exception as e:
            raise Left(f"an item between {indices[0]} and {indices[-1]} failed to load ({type(e).__name__})") from e
        if not isinstance(items, list | tuple) or len(items) != len(indices):
            raise Left("the dataset yields whole batches, not items")
        return list(items)

    def probe(self, limit_bytes: int) -> None:
        """Load some items twice. Raises Left where they differ, or all would be too large or take too long."""
        sizes: list[int] = []
        loading_s = 0.0
        deadline = time.perf_counter() + PROBE_LIMIT_S
        count = min(PROBED, self.length)
        for i in (self.length * k // count for k in range(count)):
            began = time.perf_counter()
            before = Randomness()
            (item,) = self.items([i])
            loading_s += time.perf_counter() - began
            if not same(Randomness().states, before.states) or not same(item, self.items([i])[0]):
                raise Left("items differ on each load (random augmentation), and a cache would freeze them")
            sizes.append(item_bytes(item))
            if time.perf_counter() > deadline:
                break
        share = self.length / max(1, len(sizes))
        if share * loading_s > LIMIT_S:
            raise Left(
                f"loading the {self.length} items would take {while_s(share * loading_s)}, more than {while_s(LIMIT_S)}"
            )
        if share * sum(sizes) > limit_bytes:
            raise Left(_too_large(f"the {self.length} items", share * sum(sizes), limit_bytes))

    def all(self, limit_bytes: int) -> tuple[list[Any], int]:
        """All items and their size. Raises Left where they turn out to be more than the probe has predicted."""
        items: list[Any] = []
        size_bytes = 0
        deadline = time.perf_counter() + 2 * LIMIT_S
        for start in range(0, self.length, CHUNK):
            doing.words = f"filling the cache, {number(start)} of {number(self.length)} items"
            chunk = self.items(list(range(start, min(start + CHUNK, self.length))))
            items += chunk
            size_bytes += sum(map(item_bytes, chunk))
            if size_bytes > limit_bytes:
                raise Left(_too_large(f"{len(items)} of the {self.length} items", size_bytes, limit_bytes))
            if time.perf_counter() > deadline:
                raise Left(f"after {while_s(2 * LIMIT_S)} only {len(items)} of the {self.length} items were loaded")
        return items, size_bytes


def _still_true(load: _Loading, items: list[Any]) -> bool:
    if load.length != len(items):
        return False
    count = min(CHECKED_AGAIN, len(items))
    places = [len(items) * k // count for k in range(count)]
    return all(same(items[i], load.items([i])[0]) for i in places)


def _copies(loader: DataLoader[Any], workers: int) -> int:
    """How many workers have the items a second time: forked ones share them with this process."""
    from gpulab.knobs.description import observed_loader

    return 0 if not workers or observed_loader(loader).start_method == "fork" else workers


def _reference(dataset: Any, drop: Any) -> Reference:
    try:
        return weakref.ref(dataset, drop)
    except TypeError:
        raise Left(f"a {type(dataset).__name__} has no weak references, so its items could not be freed") from None


def _from_memory(dataset: str) -> str:
    return f"{dataset} from memory"


def _unchanged(dataset: str) -> str:
    return f"{dataset} unchanged"


def _too_large(what: str, size_bytes: float, limit_bytes: int) -> str:
    most = f"the limit is {size(limit_bytes)}, {percent(MEMORY_SHARE)} of the free memory"
    return f"{what} take {size(size_bytes)}; {most}"


# -- items -------------------------------------------------------------------------------------------------------------


def item_bytes(item: Any, depth: int = 0) -> int:
    """An estimate: tensors, arrays, images, strings and what containers hold; other objects by their attributes."""
    if depth > _DEPTH:
        return 0
    own = sys.getsizeof(item, 0)
    nbytes = getattr(item, "nbytes", None)
    if isinstance(nbytes, int):  # tensors and arrays
        return own + nbytes
    if isinstance(item, str | bytes | bytearray | int | float | bool | None):
        return own
    if isinstance(item, Mapping):
        return own + sum(item_bytes(k, depth + 1) + item_bytes(v, depth + 1) for k, v in item.items())
    if isinstance(item, list | tuple | set | frozenset):
        return own + sum(item_bytes(part, depth + 1) for part in item)
    if hasattr(item, "getbands"):  # an image of Pillow's: one byte a pixel and band, or four
        width, height = item.size
        return own + int(width * height * max(len(item.getbands()), 4 if item.mode in ("I", "F") else 1))
    return own + item_bytes(getattr(item, "__dict__", None), depth + 1)


def same(a: Any, b: Any, depth: int = 0) -> bool:
    """Equal in type, shape and every value, NaN with NaN. Of objects that can only be told apart by identity, yes."""
    import numpy as np
    import torch

    if a is b or depth > _DEPTH:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.all((a == b) | ((a != a) & (b != b))))
    if isinstance(a, np.ndarray):
        return _same_arrays(a, b, depth)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[k], b[k], depth + 1) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y, depth + 1) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    try:
        if bool(a == b):
            return True
    except Exception:  # an __eq__ that gives an array
        return same(getattr(a, "__dict__", None), getattr(b, "__dict__", None), depth + 1)
    by_identity = getattr(type(a), "__eq__", None) is getattr(object, "__eq__", None)
    return by_identity and same(getattr(a, "__dict__", None), getattr(b, "__dict__", None), depth + 1)


def _same_arrays(a: Any, b: Any, depth: int) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return same(a.tolist(), b.tolist(), depth + 1) if a.dtype.hasobject else bool(a.tobytes() == b.tobytes())


CACHE = DatasetCache()
