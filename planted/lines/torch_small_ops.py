"""Many small operations of PyTorch in a loop."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, train

KIND = "items"


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.full((64,), float(index))
        for _ in range(250):  # HOT
            x = x * 0.9 + 1
        return x


def main(workers: int) -> None:
    train(Items(), workers)
