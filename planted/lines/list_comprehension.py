"""A list built in one expression."""

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
        shift = index % 13
        values = [(i * i + shift) % 97 for i in range(9_000)]  # HOT
        return row(values[:64])


def main(workers: int) -> None:
    train(Items(), workers)
