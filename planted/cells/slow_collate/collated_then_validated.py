# /// cell
# causes = ["slow_collate", "logging_or_eval"]
# because = "1280 numbers of a batch are set one by one, then 3000 rows are predicted every tenth step"
# batch = 32
# steps = 50
# warmup = 10
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = "collate_fn=cell_by_cell"
# new = "collate_fn=at_once"
#
# [[second_cure]]
# old = "CHECK_EVERY = 10"
# new = "CHECK_EVERY = 10_000"
# ///
"""Batches are built cell by cell from rows of a table, and every tenth step is followed by a validation."""

import torch
from torch import nn
from torch.utils.data import DataLoader

rows = [{"values": [float((i * j) % 17) for j in range(40)], "label": i % 3} for i in range(2240)]
held_out = torch.randn(3000, 40)


def cell_by_cell(items):
    x = torch.empty(len(items), 40)
    for i, item in enumerate(items):
        for j, value in enumerate(item["values"]):
            x[i, j] = value / 17
    return x, torch.tensor([item["label"] for item in items])


def at_once(items):
    return torch.tensor([item["values"] for item in items]) / 17, torch.tensor([item["label"] for item in items])


model = nn.Sequential(nn.Linear(40, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
CHECK_EVERY = 10

# %% the training cell
step = 0
for epoch in range(10):
    for x, y in DataLoader(rows, batch_size=32, shuffle=True, collate_fn=cell_by_cell, drop_last=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        step += 1
        if step % CHECK_EVERY == 0:
            with torch.no_grad():
                print(step, model(held_out).softmax(-1).amax(-1).mean().item())
