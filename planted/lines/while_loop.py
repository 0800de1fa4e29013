"""A loop with a condition of its own."""

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
        number, count = 10**9 + 7 * index, 0
        while count < 6_000:  # HOT
            number = (number * 1_103_515_245 + 12_345) % 2**31
            count += 1
        return row([number / 2**31])


def main(workers: int) -> None:
    train(Items(), workers)
