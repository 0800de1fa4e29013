"""A call of NumPy that sorts."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"

TABLE = np.random.default_rng(0).random((4, 20_000))


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        column = TABLE[index % 4]
        order = np.argsort(column, kind="stable")  # HOT
        return row(torch.from_numpy(column[order[:64]]))


def main(workers: int) -> None:
    train(Items(), workers)
