"""A generator expression that is summed up."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        offset = index % 7
        total = sum(i * offset for i in range(12_000))  # HOT
        return row([total / 1e9])


def main(workers: int) -> None:
    train(Items(), workers)
