"""An image that is turned."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"

IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (220, 220), dtype=np.uint8))


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        image = IMAGE.copy()
        turned = image.rotate(index % 40 + 3.0, resample=Image.Resampling.BICUBIC)  # HOT
        return row(torch.tensor(turned.getpixel((100, 100))))


def main(workers: int) -> None:
    train(Items(), workers)
