"""Where the user's code that makes a batch is written: found through what wraps it, never by running it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

import gpulab
from gpulab.capture.loader_facts import lines_of_batches


class Photos(Dataset[Any]):
    """Asked whether it is true, or for anything else than an item, it ends the test."""

    def __init__(self, transform: Callable[[Any], Any] | None = None) -> None:
        self.transform = transform

    def __bool__(self) -> bool:
        raise AssertionError("a dataset is not asked whether it is true")

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        item = torch.full((3,), float(index))
        return item if self.transform is None else self.transform(item)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(8))


class Collator:
    def __call__(self, items: list[Any]) -> Any:
        return default_collate(items)


class Removing:
    """As the Trainer wraps a collator."""

    def __init__(self, within: Any) -> None:
        self.data_collator = within


def doubled(item: Any) -> Any:
    return 2 * item


def stacked(items: list[Any], axis: int = 0) -> Any:
    return torch.stack(items, axis)


def line(function: Any) -> tuple[str, int]:
    code = function.__code__
    return code.co_filename, code.co_firstlineno


def lines(loader: DataLoader[Any]) -> tuple[tuple[str, int] | None, ...]:
    found = lines_of_batches(loader)
    return tuple(
        None if (s := found[name]) is None else s[:2] for name in ("items_line", "transform_line", "collate_line")
    )


ITEM = line(Photos.__getitem__)


@pytest.mark.parametrize(
    ("dataset", "options", "expected"),
    [
        (Photos(), {}, (ITEM, None, None)),
        (Photos(doubled), {"collate_fn": stacked}, (ITEM, line(doubled), line(stacked))),
        (Subset(Photos(functools.partial(doubled)), range(4)), {}, (ITEM, line(doubled), None)),
        (ConcatDataset([Photos(), Photos()]), {"collate_fn": Collator()}, (ITEM, None, line(Collator.__call__))),
        (Photos(), {"collate_fn": Removing(functools.partial(stacked, axis=0))}, (ITEM, None, line(stacked))),
        (Stream(), {}, (line(Stream.__iter__), None, None)),
        (TensorDataset(torch.ones(8, 3)), {}, (None, None, None)),
        (torch.ones(8, 3), {}, (None, None, None)),
        ([np.ones(3)] * 8, {}, (None, None, None)),
    ],
)
def test_lines_of_the_users_are_found(dataset: Any, options: dict[str, Any], expected: object) -> None:
    assert lines(DataLoader(dataset, **options)) == expected


def test_a_run_holds_them_in_words() -> None:
    with gpulab.profile("written", show=False, save=False, live=False) as p:
        weights = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([weights], lr=0.1)
        for batch in DataLoader(Photos(doubled), batch_size=4, collate_fn=stacked, num_workers=1):
            (weights * batch).sum().backward()
            optimizer.step()
    loader = p.run.loader
    assert loader is not None
    assert loader.items_line.endswith("def __getitem__(self, index: int) -> Any:") and __file__ in loader.items_line
    assert loader.transform_line.endswith("def doubled(item: Any) -> Any:")
    assert loader.collate_line.endswith("def stacked(items: list[Any], axis: int = 0) -> Any:")
