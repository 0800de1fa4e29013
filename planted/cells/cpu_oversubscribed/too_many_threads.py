# /// cell
# causes = ["cpu_oversubscribed"]
# because = "twice as many threads as cores wait for each other in each small layer"
# batch = 16
# steps = 25
# fresh = true
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "2 * os.cpu_count()"
# new = "max(1, os.cpu_count() // 2)"
# ///
"""Two compute threads for each core, so that none is ever idle."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

THREADS = 2 * os.cpu_count()
torch.set_num_threads(THREADS)
data = TensorDataset(torch.randn(2048, 3, 24, 24), torch.randint(0, 10, (2048,)))
layers = [layer for _ in range(8) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())]
model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), *layers, nn.Flatten(), nn.Linear(2304, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

# %% the training cell
for epoch in range(5):
    for x, y in DataLoader(data, batch_size=16, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
