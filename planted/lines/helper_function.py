"""A helper of the user's that is called after each step."""

from __future__ import annotations

import torch

from planted.lines.common import BATCH, STEPS, WIDTH, learner

KIND = "step"


def confusion(step: int) -> list[list[int]]:
    """Counts pair by pair."""
    table = [[0] * 10 for _ in range(10)]
    for i in range(50_000):  # HOT
        table[i % 10][(i + step) % 10] += 1
    return table


def main(workers: int) -> None:
    model, optimizer = learner()
    for step in range(STEPS):
        x = torch.full((BATCH, WIDTH), step / STEPS)
        output = model(x)
        loss = output.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        confusion(step)
