"""NumPy indexing with a list of positions."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"

TABLE = np.random.default_rng(0).random((30_000, 8))
ORDER = np.random.default_rng(1).permutation(30_000)


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        order = ORDER
        shuffled = TABLE[order]  # HOT
        first = shuffled[index % 100]
        return row(torch.from_numpy(first))


def main(workers: int) -> None:
    train(Items(), workers)
