"""Text cleaned with a substitution."""

from __future__ import annotations

import re

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"

TEXT = "Training, by <b>hand</b>: 3 & 4 -- done! " * 300


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        text = TEXT
        clean = re.sub(r"[^a-z ]+", " ", text)  # HOT
        return row([len(clean), index])


def main(workers: int) -> None:
    train(Items(), workers)
