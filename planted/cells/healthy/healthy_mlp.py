# /// cell
# causes = []
# because = "large matrix products take the step"
# batch = 512
# steps = 6
# warmup = 2
# tries = { workers = "2", fused_optimizer = "True", batch_size = "1024" }
# cohort = "2026-11-21a"
# looked_at = true
# ///
"""Large matrix products on a table in memory."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

table = TensorDataset(torch.randn(8192, 512), torch.randn(8192, 16))
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

# %% the training cell
for epoch in range(10):
    for x, y in DataLoader(table, batch_size=512, shuffle=True):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
