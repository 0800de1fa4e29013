"""Dates parsed from text."""

from __future__ import annotations

from datetime import datetime

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"

DAYS = [f"2026-{1 + i % 12:02d}-{1 + i % 28:02d} 10:{i % 60:02d}" for i in range(120)]


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        days = []
        for day in DAYS:  # HOT
            days.append(datetime.strptime(day, "%Y-%m-%d %H:%M").timestamp())
        return row([days[index % 9] / 1e9])


def main(workers: int) -> None:
    train(Items(), workers)
