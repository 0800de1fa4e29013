"""A dataset whose items come from memory and that is the user's own in everything else."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

Fresh = Callable[[Any], Any]


class Served:
    """`fresh` makes of a kept item the one that is handed out."""

    def __init__(self, dataset: Any, items: list[Any], fresh: Fresh) -> None:
        self._dataset = dataset
        self._items = items
        self._fresh = fresh

    @property
    def as_written(self) -> object:
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


class ServedSeveral(Served):
    """Of a dataset that loads several items at once."""

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        return [self[key] for key in keys]


def served_for(loader: DataLoader[Any], items: list[Any]) -> Served:
    """The loader's dataset from memory.

    torch's own collate_fn copies what it is given; one of the user's might change an item, and a loader that does not
    batch hands it to the training: these get a copy of each.
    """
    from torch.utils.data import default_collate

    kind = ServedSeveral if getattr(loader.dataset, "__getitems__", None) else Served
    return kind(loader.dataset, items, _as_it_is if loader.collate_fn is default_collate else copy.deepcopy)


def _as_it_is(item: Any) -> Any:
    return item
