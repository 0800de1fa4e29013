"""NumPy operators after each step."""

from __future__ import annotations

import numpy as np
import torch

from planted.lines.common import BATCH, STEPS, WIDTH, learner

KIND = "step"

TABLE = np.random.default_rng(0).random((60, 4_000))


def main(workers: int) -> None:
    model, optimizer = learner()
    for step in range(STEPS):
        x = torch.full((BATCH, WIDTH), step / STEPS)
        output = model(x)
        loss = output.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        guesses = TABLE * 2
        distance = (guesses - TABLE) ** 3 / (TABLE + 1.5) ** 2.5 + (TABLE + 2.5) ** 1.7  # HOT
        best = distance[0]
        print(end=str(best[0])[:0])
