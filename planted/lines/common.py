"""What every case shares: a small model, and the loop that trains it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

WIDTH, BATCH, STEPS = 64, 8, 60


def learner() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose step takes well below a millisecond."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(dataset: Any, workers: int, **options: Any) -> None:
    """One epoch of a plain loop."""
    model, optimizer = learner()
    for x in DataLoader(dataset, batch_size=BATCH, num_workers=workers, **options):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def row(values: Any) -> torch.Tensor:
    """An item of the width that the model takes."""
    flat = torch.as_tensor(values, dtype=torch.float32).flatten()[:WIDTH]
    return nn.functional.pad(flat, (0, WIDTH - len(flat)))
