# /// cell
# causes = ["gc_pause"]
# because = "gc.collect() walks over all that the notebook holds every eighth step"
# batch = 256
# steps = 32
# warmup = 8
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "            gc.collect()\n"
# new = "            pass\n"
# ///
"""Somebody once ran out of memory: since then the garbage is collected every eighth step."""

import gc

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# annotations of the whole collection stay in memory for the error analysis later
annotations = {i: {"id": i, "boxes": [[j, j, j + 1, j + 1] for j in range(4)], "tags": ["a", i]} for i in range(6_000)}

dataset = TensorDataset(torch.randn(4096, 128), torch.randn(4096, 128))
autoencoder = nn.Sequential(
    nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 32), nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 128)
)
optimizer = torch.optim.SGD(autoencoder.parameters(), lr=1e-2)

# %% the training cell
loader = DataLoader(dataset, batch_size=256, shuffle=True)
step = 0
for epoch in range(10):
    for x, target in loader:
        loss = nn.functional.mse_loss(autoencoder(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 8 == 0:
            gc.collect()
