"""One row of a DataFrame at a time."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"

FRAME = pd.DataFrame(np.random.default_rng(0).random((500, 8)), columns=[f"c{i}" for i in range(8)])


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        total = 0.0
        for i in range(30):  # HOT
            total += float(FRAME.iloc[(index + i) % 500]["c3"])
        return row([total])


def main(workers: int) -> None:
    train(Items(), workers)
