"""A small training that experiments run: what is there before the cell, the cell, and what it must leave as it was."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.kernel_session import Answer

SETUP = """
import time
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
hidden = 16
pause = 0.0
class Points(Dataset):
    def __init__(self):
        self.x, self.y = torch.randn(96, 8), torch.randint(0, 3, (96,))
    def __len__(self):
        return 96
    def __getitem__(self, i):
        return self.x[i], self.y[i]
class Attention(nn.Module):
    def forward(self, x):
        x = x.unflatten(1, (1, 4, 4))
        return nn.functional.scaled_dot_product_attention(x, x, x).flatten(1)
data = Points()
layers = nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 16, 2), nn.Flatten(), Attention(), nn.BatchNorm1d(16), nn.Dropout(0.2)
model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=4, shuffle=True)
"""
CELL = """
factor = 1.0
for x, y in loader:
    time.sleep(pause)
    loss = factor * nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def weights(names: dict[str, Any]) -> list[torch.Tensor]:
    """A copy of the model's state."""
    return [t.clone() for t in names["model"].state_dict().values()]


def same(before: list[torch.Tensor], names: dict[str, Any]) -> bool:
    """Whether the model is bit for bit as it was."""
    return all(torch.equal(a, b) for a, b in zip(before, weights(names), strict=True))


def shown(answer: Answer) -> str:
    """All that a reader sees under a cell of a notebook."""
    bundles = (str(d.get("text/plain", "")) + str(d.get("text/html", "")) for d in answer.displays())
    return answer.stdout + "".join(bundles)
