"""The whole dataset in memory, loaded once before the loop: shows a run in which loading items costs nothing.

Refused are datasets whose items change from load to load (random augmentation) or draw random numbers: a cache would
freeze them. Refused are also datasets that, judged by their first items, would take more than 25 % of the free memory
or more than 60 s to load. Loading leaves the random state unchanged. Items are loaded when a loader is first iterated
and kept by the knob until `forget`, or until the user's dataset is gone. Each new application loads a few items again
and compares them.
"""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from gpulab.devices.cgroups import free_host_bytes
from gpulab.formatting import duration, number, percent, size, while_s
from gpulab.knobs.changed_loader import OWN_AFFAIR, Inapplicable, Option, overriding
from gpulab.knobs.description import InMemoryDataset, WeakTable, start_method
from gpulab.knobs.knob import CodeEdit, KnobEffects, Value, Verification, cannot_tell, no_effect, took_effect
from gpulab.knobs.loader_options import LoaderOption
from gpulab.knobs.observation import Observation, ObservedLoader
from gpulab.knobs.preparation import status
from gpulab.patching.randomness import Randomness, preserving_randomness
from gpulab.run import Loader, Run

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

MEMORY_SHARE = 0.25  # of the free memory
LIMIT_S = 60.0
PROBED = 16  # items, loaded twice: an augmentation with probability 1/2 is missed once in 65,000
PROBE_LIMIT_S = 4.0
CHECKED_AGAIN = 3  # items that each application compares
_DEPTH = 8  # of containers in an item
CHUNK = 64  # items at a time, for a dataset that loads several at once


class DatasetCache(LoaderOption):
    """Serve the items of every map-style dataset from memory."""

    name = "cache"
    title = "Dataset cache"
    help = "Loads the whole dataset into memory before the loop: shows what loading and decoding cost"
    same_training = False
    option: Option = "dataset"
    options = (False, True)
    helps_against = {"data_starved": 3, "cpu_preprocessing": 2, "storage_bound": 3}

    def __init__(self) -> None:
        self._items_by_dataset: WeakTable[list[Any]] = WeakTable()  # all items of datasets
        self._obstacles: WeakTable[str] = WeakTable()  # why a dataset cannot be cached

    def value_in(self, observation: Observation) -> Value | None:
        """Off if there is a loader: a baseline has no cache."""
        return None if observation.loader is None else False

    def reason(self, observed: ObservedLoader, value: Value) -> str | None:
        """Reasons that are known without loading items; other reasons are in the effects of the run."""
        if not value:
            return None
        if observed.record.iterable:
            return OWN_AFFAIR
        return "the dataset has no length" if observed.record.dataset_length is None else None

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        """From here on, serve the items of each iterated loader's dataset from memory."""
        compared: set[int] = set()  # ids of datasets that were compared in this application

        def from_memory(loader: DataLoader[Any], workers: int) -> object:
            name = type(loader.dataset).__name__
            try:
                items = self._items(loader, workers, compared, effects)
            except Inapplicable:
                effects.count(f"{name} unchanged")
                raise
            effects.count(f"{name} from memory")
            return _in_memory(loader, items)

        if value:
            undo.enter_context(overriding(self.option, from_memory, effects))

    def _items(self, loader: DataLoader[Any], workers: int, compared: set[int], effects: KnobEffects) -> list[Any]:
        """All items of the loader's dataset. Raises Inapplicable."""
        dataset = loader.dataset
        if why := self._obstacles.get(dataset):
            raise Inapplicable(why)
        began = time.perf_counter()
        try:
            with preserving_randomness():
                load = _Loading(dataset)
                items = self._items_by_dataset.get(dataset)
                if items is not None:
                    if id(dataset) in compared or load.gives(items):
                        return items
                    effects.note("the dataset's items had changed, so the cache was refilled")
                return self._fill(load, 1 + _copies(loader, workers), effects)
        except Inapplicable as e:
            with suppress(TypeError):  # it has no weak references
                self._obstacles.put(dataset, str(e))
            raise
        finally:
            compared.add(id(dataset))
            status.words = ""
            effects.preparation_s += time.perf_counter() - began

    def _fill(self, load: _Loading, copies: int, effects: KnobEffects) -> list[Any]:
        began = time.perf_counter()
        dataset, free = load.dataset, free_host_bytes()
        self._items_by_dataset.drop(dataset)
        if free is None:
            raise Inapplicable("free memory cannot be read on this system")
        limit = int(MEMORY_SHARE * free / copies)
        load.probe(limit)
        items, size_bytes = load.all(limit)

        try:
            self._items_by_dataset.put(dataset, items)
        except TypeError:
            name = type(dataset).__name__
            raise Inapplicable(f"a {name} has no weak references, so its items could not be freed") from None
        effects.note(
            f"{len(items)} items of {type(dataset).__name__} ({size(size_bytes)}) were loaded into memory in "
            f"{duration((time.perf_counter() - began) * 1e6)} before the loop"
        )
        return items

    def forget(self) -> None:
        self._items_by_dataset.clear()
        self._obstacles.clear()

    def idle_words(self, observation: Observation, value: Value, effects: KnobEffects) -> str:
        return super().idle_words(observation, value, effects) if value else "the baseline has no cache"

    def loader_evidence(self, loader: Loader, value: Value, counts: Counter[str], run: Run) -> Verification:
        """Judges by the counts of the loader's dataset."""
        if not counts[f"{loader.dataset} from memory"]:
            return no_effect("the steps were fed by a different dataset")
        if counts[f"{loader.dataset} unchanged"]:
            return cannot_tell(f"one {loader.dataset} was served from memory, another was not")
        return took_effect(f"{loader.dataset_length} items were served from memory")

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


def _copies(loader: DataLoader[Any], workers: int) -> int:
    """How many workers hold a copy of the items: forked workers share them with this process."""
    return 0 if not workers or start_method(loader) == "fork" else workers


class InMemoryBatches(InMemoryDataset):
    """In-memory items of a dataset that loads several items at once."""

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        return [self[key] for key in keys]


def _in_memory(loader: DataLoader[Any], items: list[Any]) -> InMemoryDataset:
    """The loader's dataset from memory.

    torch's own collate_fn copies its items. A user's collate_fn might change an item, and a loader without batching
    passes items to the training: these get a copy of each item.
    """
    from torch.utils.data import default_collate

    kind = InMemoryBatches if getattr(loader.dataset, "__getitems__", None) else InMemoryDataset
    return kind(loader.dataset, items, _unchanged if loader.collate_fn is default_collate else copy.deepcopy)


def _unchanged(item: Any) -> Any:
    return item


class _Loading:
    """Loads items of one dataset as torch's loader would."""

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, list | tuple):
            raise Inapplicable("the items are already in memory")
        self.dataset = dataset
        self._several = getattr(dataset, "__getitems__", None)
        try:
            self.length = len(dataset)
        except Exception:  # a user's __len__ may raise anything
            raise Inapplicable("the dataset has no length") from None

    def items(self, indices: list[int]) -> list[Any]:
        """The items at `indices`. Raises Inapplicable if the dataset cannot load them."""
        try:
            items = self._several(indices) if self._several else [self.dataset[i] for i in indices]
        except Exception as e:
            raise Inapplicable(
                f"an item between {indices[0]} and {indices[-1]} failed to load ({type(e).__name__})"
            ) from e
        if not isinstance(items, list | tuple) or len(items) != len(indices):
            raise Inapplicable("the dataset yields whole batches, not items")
        return list(items)

    def probe(self, limit_bytes: int) -> None:
        """Load some items twice. Raises Inapplicable if they differ, or the dataset would be too large or too slow."""
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
                raise Inapplicable("items differ on each load (random augmentation), and a cache would freeze them")
            sizes.append(item_bytes(item))
            if time.perf_counter() > deadline:
                break
        share = self.length / max(1, len(sizes))
        if share * loading_s > LIMIT_S:
            raise Inapplicable(
                f"loading the {self.length} items would take {while_s(share * loading_s)}, more than {while_s(LIMIT_S)}"
            )
        if share * sum(sizes) > limit_bytes:
            raise Inapplicable(_too_large(f"the {self.length} items", share * sum(sizes), limit_bytes))

    def all(self, limit_bytes: int) -> tuple[list[Any], int]:
        """All items and their size in bytes. Raises Inapplicable if they exceed the limits after all."""
        items: list[Any] = []
        size_bytes = 0
        deadline = time.perf_counter() + 2 * LIMIT_S
        for start in range(0, self.length, CHUNK):
            status.words = f"filling the cache, {number(start)} of {number(self.length)} items"
            chunk = self.items(list(range(start, min(start + CHUNK, self.length))))
            items += chunk
            size_bytes += sum(map(item_bytes, chunk))
            if size_bytes > limit_bytes:
                raise Inapplicable(_too_large(f"{len(items)} of the {self.length} items", size_bytes, limit_bytes))
            if time.perf_counter() > deadline:
                raise Inapplicable(
                    f"after {while_s(2 * LIMIT_S)} only {len(items)} of the {self.length} items were loaded"
                )
        return items, size_bytes

    def gives(self, items: list[Any]) -> bool:
        """Whether the dataset still returns these items, judged by a few of them."""
        if self.length != len(items):
            return False
        count = min(CHECKED_AGAIN, len(items))
        places = [len(items) * k // count for k in range(count)]
        return all(same(items[i], self.items([i])[0]) for i in places)


def _too_large(what: str, size_bytes: float, limit_bytes: int) -> str:
    most = f"the limit is {size(limit_bytes)}, {percent(MEMORY_SHARE)} of the free memory"
    return f"{what} take {size(size_bytes)}; {most}"


# -- items -------------------------------------------------------------------------------------------------------------


def item_bytes(item: Any, depth: int = 0) -> int:
    """Estimated size: tensors, arrays, images, strings, contents of containers; other objects by their attributes."""
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
    if hasattr(item, "getbands"):  # a Pillow image: one byte per pixel and band, or four
        width, height = item.size
        return own + int(width * height * max(len(item.getbands()), 4 if item.mode in ("I", "F") else 1))
    return own + item_bytes(getattr(item, "__dict__", None), depth + 1)


def same(a: Any, b: Any, depth: int = 0) -> bool:
    """Whether type, shape and every value are equal (NaN equals NaN). Objects without comparable values are equal."""
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
    except Exception:  # an __eq__ that returns an array
        return same(getattr(a, "__dict__", None), getattr(b, "__dict__", None), depth + 1)
    by_identity = getattr(type(a), "__eq__", None) is getattr(object, "__eq__", None)
    return by_identity and same(getattr(a, "__dict__", None), getattr(b, "__dict__", None), depth + 1)


def _same_arrays(a: Any, b: Any, depth: int) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return same(a.tolist(), b.tolist(), depth + 1) if a.dtype.hasobject else bool(a.tobytes() == b.tobytes())


CACHE = DatasetCache()
