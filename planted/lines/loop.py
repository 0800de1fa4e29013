"""A loop over characters, one number at a time."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"

WORDS = ("parallel", "gradient", "momentum", "schedule", "tensor")


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        text = WORDS[index % len(WORDS)] * 300
        ids = []
        for letter in text:  # HOT
            code = ord(letter) - 97
            ids.append(code * 7 % 101)
        return row(ids[:64])


def main(workers: int) -> None:
    train(Items(), workers)
