"""A dictionary built for each item."""

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
        counts = {f"key{i}": i * index for i in range(3_000)}  # HOT
        return row([len(counts)])


def main(workers: int) -> None:
    train(Items(), workers)
