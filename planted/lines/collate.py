"""Batches put together number by number."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, train

KIND = "items"

ROWS = [[i * n / 64 for i in range(64)] for n in range(8)]


class Items(Dataset[list[float]]):
    """Items as lists of numbers, which cost nothing."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> list[float]:
        return ROWS[index % 8]


def collate(items: list[list[float]]) -> torch.Tensor:
    """Pads each row and turns it into a tensor."""
    batch = torch.zeros(len(items), 64)
    for i, item in enumerate(items):  # HOT
        for j, value in enumerate(item[:64]):
            batch[i, j] = value
    return batch


def main(workers: int) -> None:
    train(Items(), workers, collate_fn=collate)
