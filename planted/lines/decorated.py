"""A method behind a decorator of the user's."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import torch
from torch.utils.data import Dataset

from planted.lines.common import BATCH, STEPS, row, train

KIND = "items"


def logged(function: Any) -> Any:
    """Counts the calls."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        wrapper.calls += 1  # type: ignore[attr-defined]
        return function(*args)

    wrapper.calls = 0  # type: ignore[attr-defined]
    return wrapper


class Items(Dataset[torch.Tensor]):
    """Items that take long for one reason."""

    def __len__(self) -> int:
        return BATCH * STEPS

    @logged
    def __getitem__(self, index: int) -> torch.Tensor:
        key = f"{index}".encode()
        for _ in range(1_500):  # HOT
            key = hashlib.sha256(key).digest()
        return row(list(key))


def main(workers: int) -> None:
    train(Items(), workers)
