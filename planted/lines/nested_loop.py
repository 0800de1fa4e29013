"""Two loops, one in the other."""

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
        grid = [[0.0] * 80 for _ in range(80)]
        for i in range(80):  # HOT
            for j in range(80):
                grid[i][j] = (i * j + index) % 17 / 17
        return row(grid[3])


def main(workers: int) -> None:
    train(Items(), workers)
