"""A loop, and after it calls of PyTorch that give the lock away."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, train

KIND = "items"


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        ids = []
        for i in range(6_000):  # HOT
            ids.append((i ^ index) % 251)
        x = torch.tensor(ids[:64], dtype=torch.float32)
        x = x - x.mean()
        x = x / 16
        return torch.clamp(x, -4, 4)


def main(workers: int) -> None:
    train(Items(), workers)
