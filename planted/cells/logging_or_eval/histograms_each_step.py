# /// cell
# causes = ["logging_or_eval"]
# because = "twelve histograms after each step"
# needs = ["tensorboard"]
# batch = 128
# steps = 40
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "LOG_EVERY = 1"
# new = "LOG_EVERY = 1000"
# ///
"""Histograms of all weights and gradients go to TensorBoard after each step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 8, (4096,)))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
LOG_EVERY = 1

# %% the training cell
writer = SummaryWriter("logs")
step = 0
for epoch in range(5):
    for x, y in DataLoader(data, batch_size=128, shuffle=True):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % LOG_EVERY == 0:
            writer.add_scalar("loss", loss.item(), step)
            for name, parameter in model.named_parameters():
                writer.add_histogram(f"weights/{name}", parameter.detach(), step)
                writer.add_histogram(f"gradients/{name}", parameter.grad, step)
        step += 1
writer.close()
