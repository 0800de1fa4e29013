"""A log of each step as JSON."""

from __future__ import annotations

import json

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
        record = {"step": step, "history": list(range(20_000)), "loss": 1.0}
        line = json.dumps(record, indent=1)  # HOT
        kept = line[:100]
        print(end=kept[:0])
