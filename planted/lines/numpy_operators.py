"""NumPy arithmetic without a call: operators alone."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"

IMAGES = np.random.default_rng(0).random((4, 400, 600))


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        image = IMAGES[index % 4]
        scaled = (image - 0.5) / 0.25 * image + image  # HOT
        return row(torch.from_numpy(scaled[0, :64]))


def main(workers: int) -> None:
    train(Items(), workers)
