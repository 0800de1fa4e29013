"""The work is done by a class in another file."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train
from planted.lines.tokenizer import Tokenizer

KIND = "items"


class Items(Dataset[torch.Tensor]):
    """Items that another module tokenizes."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer()

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return row(self.tokenizer.encode(f"sample {index} of many " * 200)[:64])


def main(workers: int) -> None:
    train(Items(), workers)
