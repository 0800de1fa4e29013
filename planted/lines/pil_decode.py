"""An image decoded from its bytes."""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"


def encoded(seed: int) -> bytes:
    """A picture as a file would hold it."""
    pixels = np.random.default_rng(seed).integers(0, 255, (300, 300, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


FILES = [encoded(n) for n in range(4)]


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        image = Image.open(io.BytesIO(FILES[index % 4]))
        small = image.convert("L")  # HOT
        return row(torch.tensor(small.getpixel((3, 3))))


def main(workers: int) -> None:
    train(Items(), workers)
