"""JSON parsed for each item."""

from __future__ import annotations

import json

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"

LINES = [json.dumps({"name": f"n{n}", "values": [i * n / 7 for i in range(4_000)]}) for n in range(4)]


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        text = LINES[index % 4]
        record = json.loads(text)  # HOT
        return row(record["values"][:64])


def main(workers: int) -> None:
    train(Items(), workers)
