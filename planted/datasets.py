"""Datasets of the planted cells, in a file because worker processes may have to import them."""

from __future__ import annotations

import time
import zlib

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Stored(Dataset[tuple[Tensor, Tensor]]):
    """Each item waits as for a slow disk; the processor is free meanwhile."""

    def __init__(self, count: int, wait_s: float, width: int = 16) -> None:
        self.x = torch.randn(count, width)
        self.y = torch.randn(count, 1)
        self.wait_s = wait_s

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.wait_s)
        return self.x[index], self.y[index]


class Compressed(Dataset[tuple[Tensor, Tensor]]):
    """Each item is decompressed and averaged down anew: work for the processor, with a small result."""

    def __init__(self, count: int, width: int = 16) -> None:
        rng = np.random.default_rng(0)
        rows = rng.integers(0, 8, (count, 200_000), dtype=np.uint8)
        self.rows = [zlib.compress(row.tobytes(), 1) for row in rows]
        self.width = width

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = np.frombuffer(zlib.decompress(self.rows[index]), np.uint8)
        x = torch.from_numpy(row.reshape(self.width, -1).mean(1, dtype=np.float32))
        return x, x.mean().reshape(1)
