"""A transform given as a lambda."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"

TRANSFORM = lambda x: [sum(math.sin(v) * math.cos(v) for v in x)]  # noqa: E731  # HOT


class Items(Dataset[torch.Tensor]):
    """Items that go through a transform."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return row(self.transform(range(index, index + 8_000)))


def main(workers: int) -> None:
    train(Items(TRANSFORM), workers)
