"""A nested structure copied for each item."""

from __future__ import annotations

import copy

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"

TREE = {f"k{i}": [[i, j, float(j)] for j in range(5)] for i in range(30)}


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = copy.deepcopy(TREE)  # HOT
        return row([len(sample), index])


def main(workers: int) -> None:
    train(Items(), workers)
