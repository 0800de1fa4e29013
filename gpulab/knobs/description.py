"""Describes a DataLoader, an optimizer and a module by their attributes: the facts of an observation."""

from __future__ import annotations

import functools
import inspect
import math
import multiprocessing
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gpulab.knobs.observation import ObservedDataParallel, ObservedLoader, ObservedModule, ObservedOptimizer
from gpulab.knobs.repeated_blocks import observed_blocks
from gpulab.knobs.variables import contents, walk
from gpulab.run import Loader

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader


Entry = TypeVar("Entry")


def loader_record(owner: Any) -> Loader:
    """The settings of a DataLoader; for an iterator made before the run, the settings that it still holds."""
    from torch.utils.data import IterableDataset, default_collate

    def attribute(name: str) -> Any:
        return getattr(owner, name, getattr(owner, f"_{name}", None))

    dataset = attribute("dataset")
    iterable = isinstance(dataset, IterableDataset)
    sampler = owner.batch_sampler if hasattr(owner, "batch_sampler") else owner._index_sampler
    return Loader(
        dataset=type(users_dataset(dataset)).__name__,
        dataset_length=None if iterable else length_of(dataset),
        batch_size=getattr(owner, "batch_size", None) or getattr(sampler, "batch_size", None),
        num_workers=attribute("num_workers"),
        prefetch_factor=attribute("prefetch_factor"),
        pin_memory=bool(attribute("pin_memory")),
        persistent_workers=bool(attribute("persistent_workers")),
        length=None if iterable else length_of(owner),
        iterable=iterable,
        own_collate=attribute("collate_fn") is not default_collate,
    )


class WeakTable(Generic[Entry]):
    """A table keyed by object identity with weak references. An entry disappears with its object."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Entry]] = {}

    def get(self, thing: object) -> Entry | None:
        entry = self._entries.get(id(thing))
        return entry[1] if entry is not None and entry[0]() is thing else None

    def put(self, thing: object, value: Entry) -> None:
        """Raises TypeError if the object has no weak references."""
        key = id(thing)

        def drop(reference: weakref.ref[Any]) -> None:
            entry = self._entries.get(key)
            if entry is not None and entry[0] is reference:
                del self._entries[key]

        self._entries[key] = weakref.ref(thing, drop), value

    def drop(self, thing: object) -> None:
        self._entries.pop(id(thing), None)

    def values(self) -> list[Entry]:
        return [value for _, value in self._entries.values()]

    def clear(self) -> None:
        self._entries.clear()


class InMemoryDataset:
    """A dataset whose items come from memory; all other attributes are those of the user's dataset.

    `fresh` turns an item in memory into the item that is returned.
    """

    def __init__(self, dataset: Any, items: list[Any], fresh: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._items = items
        self._fresh = fresh

    @property
    def users_dataset(self) -> object:
        return self._dataset

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, key: Any) -> Any:
        try:
            index = operator.index(key)
        except TypeError:
            return self._dataset[key]
        return self._fresh(self._items[index]) if 0 <= index < len(self._items) else self._dataset[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and "_dataset" not in vars(self):  # being unpickled or copied
            raise AttributeError(name)
        return getattr(self._dataset, name)


def users_dataset(dataset: object) -> object:
    """The user's dataset, also if a knob has replaced it."""
    return dataset.users_dataset if isinstance(dataset, InMemoryDataset) else dataset


def observed_loader(loader: DataLoader[Any]) -> ObservedLoader:
    """A DataLoader, with the facts that limit its options."""
    from torch.utils.data import BatchSampler

    sampler = loader.batch_sampler
    return ObservedLoader(
        record=loader_record(loader),
        custom_batch_sampler=sampler is not None and type(sampler) is not BatchSampler,
        dataset_from_main=not main_can_be_imported() and bool(defined_in_main(loader)),
        start_method=start_method(loader),
    )


def observed_optimizer(optimizer: Optimizer) -> ObservedOptimizer:
    """An optimizer. The param groups of torch's optimizers show whether there is a fused form."""
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    return ObservedOptimizer(
        class_name=type(optimizer).__name__,
        supports_fused="fused" in groups[0],
        fused=groups[0].get("fused"),
        parameter_devices=_distinct(str(p.device) for p in parameters),
        parameter_dtypes=_distinct(dtype_name(p.dtype) for p in parameters),
        takes_closure=_needs_closure(type(optimizer).step),
    )


def observed_module(module: Module) -> ObservedModule:
    """A module; parameters without a shape yet (lazy ones) are not counted."""
    from torch.nn.modules.conv import _ConvNd
    from torch.nn.parameter import is_lazy

    parameters = [p for p in module.parameters() if not is_lazy(p)]
    return ObservedModule(
        class_name=type(getattr(module, "_orig_mod", module)).__name__,
        parameter_count=sum(p.numel() for p in parameters),
        parameter_dtypes=_distinct(dtype_name(p.dtype) for p in parameters),
        has_convolution=any(isinstance(m, _ConvNd) for m in module.modules()),
        memory_format=_memory_format(p for p in parameters if p.dim() == 4),
        compiled=any(map(is_compiled, module.modules())),
        trained=False,
        autocast_dtype=None,
        data_parallel=observed_data_parallel(module),
        fully_sharded=_is_fully_sharded(module),
        blocks=observed_blocks(module) if parameters else None,
    )


def observed_data_parallel(module: Module) -> ObservedDataParallel | None:
    """The module as a DistributedDataParallel; None if it is none, or the code has not imported that class."""
    wrapping = sys.modules.get("torch.nn.parallel.distributed")
    if wrapping is None or not isinstance(module, wrapping.DistributedDataParallel):
        return None
    cap_mb = module.bucket_bytes_cap / 2**20
    return ObservedDataParallel(
        bucket_cap_mb=int(cap_mb) if cap_mb.is_integer() else cap_mb,
        gradient_as_bucket_view=bool(module.gradient_as_bucket_view),
        static_graph=bool(module.static_graph),
        has_hook=bool(getattr(module, "_comm_hooks", None)),
        backend=_backend(module),
        bucket_count=_bucket_count(module),
    )


def _backend(module: Any) -> str:
    """The back end of the process group; empty if the group is gone."""
    try:
        return str(sys.modules["torch.distributed"].get_backend(module.process_group))
    except ValueError:
        return ""


def _bucket_count(module: Any) -> int:
    """The number of buckets. With the default size the first one is smaller, so that the exchange starts early."""
    first_bytes: int = 2**20 if getattr(module, "bucket_bytes_cap_default", False) else module.bucket_bytes_cap
    gradient_bytes: int = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    cap_bytes = max(1, int(module.bucket_bytes_cap))
    return 1 + math.ceil(max(0, gradient_bytes - first_bytes) / cap_bytes)


def _is_fully_sharded(module: Module) -> bool:
    sharding = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(sharding, "FSDPModule", None)
    return kind is not None and any(isinstance(part, kind) for part in module.modules())


def is_compiled(module: Module) -> bool:
    """Whether torch.compile made it or `Module.compile` was called on it."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or type(module).__module__ == "torch._dynamo.eval_frame"


def dtype_name(kind: dtype) -> str:
    return str(kind).removeprefix("torch.")


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def length_of(sized: Any) -> int | None:
    """`len`, or None if the object has none or raises."""
    try:
        return len(sized)
    except Exception:  # a user's __len__ may raise anything
        return None


def _memory_format(weights: Iterable[Tensor]) -> str | None:
    """The memory format of 4-dimensional weights; a weight that fits both formats (1×1 convolution) has no vote."""
    from torch import channels_last

    fits = {(w.is_contiguous(), w.is_contiguous(memory_format=channels_last)) for w in weights}
    if not fits:
        return None
    telling = fits - {(True, True)}
    if telling == {(False, True)}:
        return "channels_last"
    return "contiguous" if telling <= {(True, False)} else "mixed"


def _needs_closure(step: Callable[..., object]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


_BY_NAME = (type, types.FunctionType)  # pickled by name
_PICKLING = ("__getstate__", "__reduce__", "__reduce_ex__")


def start_method(loader: Any = None) -> str:
    """How workers would start; without a loader, by the default. Does not fix a default that is still open."""
    context = getattr(loader, "multiprocessing_context", None)
    method: str | None = (context or multiprocessing).get_start_method(allow_none=True)
    return method or multiprocessing.get_all_start_methods()[0]


def main_can_be_imported() -> bool:
    """Whether `multiprocessing.spawn` lets a worker import the main module; a notebook cannot be imported."""
    main = sys.modules["__main__"]
    return (
        getattr(getattr(main, "__spec__", None), "name", None) is not None
        or getattr(main, "__file__", None) is not None
    )


def defined_in_main(loader: Any) -> list[str]:
    """Classes and functions of `__main__` among the objects that pickle would send to a loader's workers."""
    things = walk(loader.dataset, loader.collate_fn, loader.worker_init_fn, follow=_pickled_with)
    definitions = (thing if isinstance(thing, _BY_NAME) else type(thing) for thing in things)
    return list(dict.fromkeys(one.__qualname__ for one in definitions if one.__module__ == "__main__"))


def _pickled_with(thing: object) -> Iterable[object]:
    if isinstance(thing, _BY_NAME):
        return ()
    if isinstance(thing, types.MethodType):
        return (thing.__self__,)
    if isinstance(thing, functools.partial):
        return contents(thing)
    pickles_itself = any(getattr(type(thing), name) is not getattr(object, name) for name in _PICKLING)
    return () if pickles_itself else contents(thing)
