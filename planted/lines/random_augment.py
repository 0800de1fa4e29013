"""Noise drawn number by number."""

from __future__ import annotations

import random

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        base = index / 100
        noisy = [base + random.gauss(0, 1) for _ in range(3_000)]  # HOT
        return row(noisy[:64])


def main(workers: int) -> None:
    train(Items(), workers)
