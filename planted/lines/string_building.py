"""A text built piece by piece."""

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
        text = ""
        for number in range(2_500):  # HOT
            text = f"{number % 10}" + text
        return row([len(text), index])


def main(workers: int) -> None:
    train(Items(), workers)
