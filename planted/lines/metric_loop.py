"""A metric worked out in plain Python after each step."""

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
        scores = []
        for i in range(60_000):  # HOT
            scores.append((i * step) % 13)
