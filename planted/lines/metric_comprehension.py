"""The same in one expression."""

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
        hits = [p % 3 == t % 5 for p, t in zip(range(60_000), range(step, 60_000 + step), strict=True)]  # HOT
        accuracy = sum(hits[:100])
        print(end="" if accuracy else " ")
