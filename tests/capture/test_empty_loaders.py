"""A DataLoader that gives no batch is named as the reason why no step ran, with what makes it empty."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

import gpulab


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def items(count: int) -> TensorDataset:
    return TensorDataset(torch.ones(count, 4))


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (lambda: DataLoader(items(4), batch_size=8, drop_last=True), "4 items, batch_size 8, drop_last"),
        (lambda: iter(DataLoader(items(4), batch_size=8, drop_last=True)), "4 items, batch_size 8, drop_last"),
        (lambda: DataLoader(items(4), batch_size=8, drop_last=True, num_workers=1), "4 items, batch_size 8, drop_last"),
        (lambda: DataLoader(items(0), batch_size=8), "TensorDataset has 0 items"),
        (
            lambda: DataLoader(items(4), sampler=SubsetRandomSampler([])),
            "its SubsetRandomSampler chooses none of 4 items",
        ),
        (lambda: DataLoader(Nothing(), batch_size=8), "its IterableDataset Nothing ended at once"),
        (
            lambda: DataLoader(Nothing(), batch_size=8, drop_last=True),
            "its IterableDataset Nothing ended at once, or after fewer than 8 items (drop_last)",
        ),
    ],
)
def test_a_loader_without_a_batch_is_named(loader: Any, why: str) -> None:
    made = loader()
    with gpulab.profile("empty", show=False, save=False) as p:
        for _ in range(2):
            for _ in made:
                pytest.fail("a batch")
    assert p.report.headline.sentence == f"Your DataLoader yielded 0 batches: {why}."


def test_one_that_gave_a_batch_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with gpulab.profile("some", show=False, save=False) as p:
        for _ in DataLoader(items(4)):
            pass
        list(DataLoader(items(0)))
    assert "0 batches" not in p.report.text(full=True)


def test_code_that_needs_a_batch_is_told_beside_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StopIteration), gpulab.profile("next", save=False):
        next(iter(DataLoader(items(4), batch_size=8, drop_last=True)))
    assert "The DataLoader yielded 0 batches: 4 items, batch_size 8, drop_last." in capsys.readouterr().out
