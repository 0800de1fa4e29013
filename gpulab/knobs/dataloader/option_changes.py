"""What each overridden option changes in a copy of a DataLoader, and when a loader is left as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpulab.devices.machine import detect_device
from gpulab.knobs.observe.describe import length_of, observed_loader

if TYPE_CHECKING:
    from torch.utils.data import BatchSampler, DataLoader

Changes = dict[str, Any]  # attributes of the copy that are not those of the user's loader
PREFETCH_OF_TORCH = 2  # batches per worker, where nothing is said

OWN_AFFAIR = (
    "the dataset is an IterableDataset, which orders its data and shards them across workers itself: "
    "the run might see different data"
)
UNFIT_FOR_SPAWN = (
    "the notebook defines the Dataset (or collate_fn, worker_init_fn): workers started by {method} cannot "
    "import it; move it to a .py file, or keep workers=0"
)
NO_WORKERS = "the DataLoader has no workers; set workers=2 together with it"
NOTHING_TO_PIN_FOR = "there is no GPU: torch does not pin memory here"


class Left(Exception):
    """A loader keeps this option as it is; why, in words for the user."""


def rebatched(loader: DataLoader[Any], size: int) -> BatchSampler:
    """Batches of that size from the same sampler. Raises Left."""
    from torch.utils.data import BatchSampler

    _not_iterable(loader)
    sampler = loader.batch_sampler
    if sampler is None:
        raise _left(loader, "automatic batching is off (batch_size=None)")
    if type(sampler) is not BatchSampler:
        raise _left(loader, f"your code passes its own batch_sampler ({type(sampler).__name__})")
    if sampler.batch_size == size:
        return sampler
    length = length_of(sampler.sampler)
    if length is not None and size > length:
        raise _left(loader, f"the dataset has {length} items, fewer than a batch of {size}")
    return BatchSampler(sampler.sampler, size, sampler.drop_last)


def settled(loader: DataLoader[Any], changes: Changes) -> Changes:
    """The changes with what follows from them, without those that are none."""
    workers = changes.get("num_workers", loader.num_workers)
    if not workers and loader.num_workers:
        changes.update(prefetch_factor=None, persistent_workers=False, timeout=0)  # torch accepts no other
    elif workers and changes.get("prefetch_factor", loader.prefetch_factor) is None:
        changes["prefetch_factor"] = PREFETCH_OF_TORCH
    return {name: value for name, value in changes.items() if _differs(getattr(loader, name), value)}


def _workers(loader: DataLoader[Any], changes: Changes, count: int) -> None:
    _not_iterable(loader)
    if count and not loader.num_workers:
        seen = observed_loader(loader)
        if seen.dataset_from_main and seen.start_method != "fork":
            raise _left(loader, UNFIT_FOR_SPAWN.format(method=seen.start_method))
    changes["num_workers"] = count


def _prefetch(loader: DataLoader[Any], changes: Changes, batches: int) -> None:
    _not_iterable(loader)
    _needs_workers(loader, changes)
    changes["prefetch_factor"] = batches


def _persistent(loader: DataLoader[Any], changes: Changes, on: bool) -> None:
    _not_iterable(loader)
    if on:
        _needs_workers(loader, changes)
    changes["persistent_workers"] = on


def _pin(loader: DataLoader[Any], changes: Changes, on: bool) -> None:
    if on and not _can_pin():
        raise Left(NOTHING_TO_PIN_FOR)
    changes["pin_memory"] = on


def _batch_size(loader: DataLoader[Any], changes: Changes, size: int) -> None:
    changes["batch_sampler"] = rebatched(loader, size)
    if loader.batch_size is not None:  # accelerate gives its loaders a batch_sampler instead
        changes["batch_size"] = size


def _dataset(loader: DataLoader[Any], changes: Changes, build: Callable[[DataLoader[Any], int], object]) -> None:
    _not_iterable(loader)
    try:
        changes["dataset"] = build(loader, changes.get("num_workers", loader.num_workers))
    except Left as why:
        raise _left(loader, str(why)) from None


CHANGES: dict[str, Callable[[Any, Changes, Any], None]] = {  # in the order in which they are applied
    "num_workers": _workers,
    "prefetch_factor": _prefetch,
    "persistent_workers": _persistent,
    "pin_memory": _pin,
    "batch_size": _batch_size,
    "dataset": _dataset,
}


def pins_nothing_here() -> bool:
    """Whether this machine has no GPU that memory could be pinned for. Starts none."""
    if detect_device("auto").kind == "cuda":  # torch's own question would start its driver
        return False
    return not _can_pin()


def _can_pin() -> bool:
    from torch import accelerator

    current = accelerator.current_accelerator()
    return accelerator.is_available() and current is not None and current.type != "mps"


def _not_iterable(loader: DataLoader[Any]) -> None:
    from torch.utils.data import IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        raise _left(loader, OWN_AFFAIR)


def _needs_workers(loader: DataLoader[Any], changes: Changes) -> None:
    if not changes.get("num_workers", loader.num_workers):
        raise _left(loader, NO_WORKERS)


def _left(loader: DataLoader[Any], why: str) -> Left:
    return Left(f"the DataLoader of {type(loader.dataset).__name__} was not changed: {why}")


def _differs(old: object, new: object) -> bool:
    plain = isinstance(new, bool | int | float | None)
    return old != new if plain else old is not new
