"""Words looked up in a list where a set would do."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"

VOCABULARY = [f"word{i}" for i in range(60_000)][::-1]


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        word = f"word{9_000 + index % 900}"
        known = word in VOCABULARY  # HOT
        seen = float(known)
        return row([seen])


def main(workers: int) -> None:
    train(Items(), workers)
