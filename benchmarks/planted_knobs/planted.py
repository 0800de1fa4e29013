"""What a planted cell is: a training cell in which the truth about one knob is certain before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Truth = Literal["faster", "slower", "no measurable difference"]

IMPORTS = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
"""

LOOP = """
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
"""


@dataclass(frozen=True, slots=True)
class Planted:
    """One cell. `before` are the notebook's earlier cells; `because` is the physics, for people.

    `steps` counted in a block and `pairs` of blocks bound its time; None leaves the steps to gpulab.
    """

    knob: str
    value: bool | int | str
    truth: Truth
    because: str
    before: str
    cell: str = LOOP
    steps: int | None = None
    pairs: int = 10

    @property
    def name(self) -> str:
        """As in the table and in the names of tests."""
        return f"{self.knob}={self.value}, {self.truth}"
