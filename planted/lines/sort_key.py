"""Sorting with a key that is worked out for each element."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"

ROWS = [{"a": i * 31 % 977, "b": i * 17 % 613} for i in range(2_500)]


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        rows = ROWS
        ranked = sorted(rows, key=lambda r: (r["b"] % 7, -r["a"]))  # HOT
        return row([ranked[index % 9]["a"]])


def main(workers: int) -> None:
    train(Items(), workers)
