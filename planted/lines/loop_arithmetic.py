"""A loop of plain arithmetic."""

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
        total = float(index)
        for step in range(8_000):  # HOT
            total = total * 0.999 + step
        return row([total])


def main(workers: int) -> None:
    train(Items(), workers)
