"""A DataFrame searched for each item."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"

GENERATOR = np.random.default_rng(0)
FRAME = pd.DataFrame({"user": GENERATOR.integers(0, 50, 60_000), "value": GENERATOR.random(60_000)})


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        wanted = index % 50
        rows = FRAME[FRAME["user"] == wanted]  # HOT
        return row(torch.from_numpy(rows["value"].to_numpy(copy=True)))


def main(workers: int) -> None:
    train(Items(), workers)
