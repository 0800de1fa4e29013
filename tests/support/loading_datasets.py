"""Datasets whose slow part is planted, importable by workers that are started, not forked."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info


def burn(seconds: float) -> None:
    """CPU time of this process, not wall time: on a busy machine it takes longer."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Burn:
    """A transform with attributes of its own."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __call__(self, x: Any) -> Any:
        burn(self.seconds)
        return x


class Planted(Dataset[Any]):
    """`wait_s` sleeps and `work_s` computes in `__getitem__`; `transform` is one as torchvision's datasets have."""

    def __init__(self, n: int = 40, wait_s: float = 0.0, work_s: float = 0.0, transform: Any = None) -> None:
        self.n, self.wait_s, self.work_s, self.transform = n, wait_s, work_s, transform
        self.offset = 0.0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.wait_s:  # sleeping for no time gives the core away, too
            time.sleep(self.wait_s)
        burn(self.work_s)
        x = torch.full((4,), float(i) + self.offset)
        if self.transform is not None:
            assert isinstance(self.transform, Burn) and self.transform.seconds >= 0
            x = self.transform(x)
        return x


class Drawing(Planted):
    """Draws from every generator there is."""

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.cat((torch.rand(2), torch.tensor([random.random(), np.random.rand()]))) + i


class AtOnce(Planted):
    """Loads several items at once."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [torch.full((4,), float(i)) for i in indices]


class Failing(Planted):
    """Cannot load its item 9."""

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 9:
            raise ValueError("item 9 is broken")
        return super().__getitem__(i)


class Dying(Planted):
    """Its worker ends at item 20."""

    def __getitem__(self, i: int) -> torch.Tensor:
        import os

        if i == 20 and get_worker_info() is not None:
            os._exit(3)
        return super().__getitem__(i)


class Stream(IterableDataset[Any]):
    """Shares its numbers out among the workers."""

    def __init__(self, n: int = 40, transform: Any = None) -> None:
        self.n, self.transform = n, transform

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        transform = self.transform
        for i in range(first, self.n, step):
            x = torch.full((4,), float(i))
            yield x if transform is None else transform(x)


def offset(worker: int) -> None:
    """A worker_init_fn that changes the worker's own dataset."""
    info = get_worker_info()
    assert info is not None and info.id == worker
    assert isinstance(info.dataset, Planted) and type(info.dataset).__module__ == __name__
    info.dataset.offset = 100.0


class Choosing(Sampler[int]):
    """In order, each after a while."""

    def __init__(self, count: int, wait_s: float) -> None:
        self.count, self.wait_s = count, wait_s

    def __iter__(self) -> Iterator[int]:
        for index in range(self.count):
            time.sleep(self.wait_s)
            yield index

    def __len__(self) -> int:
        return self.count


def slow_collate(items: list[torch.Tensor]) -> torch.Tensor:
    """Much work for little."""
    burn(0.02)
    return torch.stack(items)


class StandIns(Planted):
    """Each item is how often the item's transform was a stand-in of the profiler's, 0 or 1, four times."""

    def __getitem__(self, i: int) -> torch.Tensor:
        super().__getitem__(i)
        return torch.full((4,), float(type(self.transform) is not Burn))
