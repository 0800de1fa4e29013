"""A function that calls itself."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"


def fibonacci(n: int) -> int:
    """The slow way."""
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)  # HOT


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return row([fibonacci(16 + index % 2)])


def main(workers: int) -> None:
    train(Items(), workers)
