"""A regular expression over a long text."""

from __future__ import annotations

import re

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"

TEXT = "the quick brown fox jumps over 13 lazy dogs at 10:45 or so; " * 300
PATTERN = re.compile(r"(?:[a-z]+ )+([0-9]+)")


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        text = f"{index} " + TEXT
        found = PATTERN.findall(text)  # HOT
        return row([len(found)])


def main(workers: int) -> None:
    train(Items(), workers)
