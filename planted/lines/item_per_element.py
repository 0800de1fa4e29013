"""`.item()` for each element of an output."""

from __future__ import annotations

import torch

from planted.lines.common import BATCH, STEPS, WIDTH, learner

KIND = "step"


def main(workers: int) -> None:
    model, optimizer = learner()
    for step in range(STEPS):
        x = torch.full((BATCH, WIDTH), step / STEPS)
        output = model(x)
        loss = output.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        flat = output.detach().flatten()
        total = 0.0
        for _ in range(8):
            total += sum(value.item() for value in flat.repeat(50))  # HOT
