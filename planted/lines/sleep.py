"""A wait for something outside, as for a file server."""

from __future__ import annotations

import time

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        values = [index] * 64
        time.sleep(0.002)  # HOT
        return row(values)


def main(workers: int) -> None:
    train(Items(), workers)
