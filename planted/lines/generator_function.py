"""A generator of the user's, drawn from in a line that looks harmless."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"


def numbers(seed: int) -> Any:
    """Few numbers, each after much work."""
    for start in range(8):
        number = sum((seed * i + start) % 11 for i in range(1_500))  # HOT
        yield number


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return row(list(numbers(index)))


def main(workers: int) -> None:
    train(Items(), workers)
