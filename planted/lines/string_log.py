"""A message built after each step."""

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
        names = [name for name, _ in model.named_parameters()]
        text = ", ".join(f"{name}={i * step:.4f}" for i in range(4_000) for name in names)  # HOT
        print(end=text[:0])
