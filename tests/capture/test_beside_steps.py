"""Who waits is told what goes on where it is no step: workers that start, a cache that is filled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from gpulab.capture.pilot import ShortRun
from gpulab.knobs.dataset_cache import DatasetCache


class Listening(Dataset[torch.Tensor]):
    """Asks what is said while it loads: in the process of the training alone."""

    def __init__(self) -> None:
        self.ask: Callable[[], str] = lambda: ""
        self.heard: list[str] = []

    def __len__(self) -> int:
        return 70

    def __getitem__(self, index: int) -> torch.Tensor:
        self.heard.append(self.ask())
        return torch.full((4,), float(index))


def train(loader: DataLoader[torch.Tensor], asked: Callable[[], object] = lambda: None) -> None:
    layer = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for batch in loader:
        asked()
        layer(batch).sum().backward()
        optimizer.step()


def test_before_the_first_step_it_says_so() -> None:
    dataset = Listening()
    with ShortRun(3) as run:
        dataset.ask = lambda: run.beside_steps
        train(DataLoader(dataset, batch_size=2))
    assert dataset.heard[:2] == ["before the first step"] * 2 and dataset.heard[-1] == ""


def test_workers_start_until_they_give_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    with ShortRun(3) as run:
        loader = DataLoader(Listening(), batch_size=2, num_workers=2)
        started = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._reset

        def reset(*args: object, **options: object) -> object:
            heard.append(run.beside_steps)
            return started(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(torch.utils.data.dataloader._MultiProcessingDataLoaderIter, "_reset", reset)
        train(loader, lambda: heard.append(run.beside_steps))
    assert heard == ["starting 2 workers", "before the first step", "", ""]


def test_a_cache_says_how_far_it_is_filled() -> None:
    dataset = Listening()
    with DatasetCache().applied(True), ShortRun(3) as run:
        dataset.ask = lambda: run.beside_steps
        train(DataLoader(dataset, batch_size=2))
    assert "filling the cache, 0 of 70 items" in dataset.heard and "filling the cache, 64 of 70 items" in dataset.heard
    assert run.beside_steps == ""
