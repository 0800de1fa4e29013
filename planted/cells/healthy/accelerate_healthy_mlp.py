# /// cell
# causes = []
# because = "large matrix products take the step"
# framework = "accelerate"
# batch = 320
# steps = 10
# warmup = 3
# tries = { workers = "2", fused_optimizer = "True", batch_size = "640" }
# cohort = "2026-11-21b"
# looked_at = true
# ///
"""Wide layers on a table in memory; Accelerate."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(2)
table = TensorDataset(torch.randn(6400, 256), torch.randint(0, 20, (6400,)))
model = nn.Sequential(nn.Linear(256, 1792), nn.ReLU(), nn.Linear(1792, 1792), nn.ReLU(), nn.Linear(1792, 20))

# %% the training cell
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(table, batch_size=320, shuffle=True))
for epoch in range(6):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(loss.item())
