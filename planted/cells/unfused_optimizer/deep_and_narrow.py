# /// cell
# causes = ["unfused_optimizer"]
# because = "164 small tensors, for each of which AdamW calls a dozen operations; twice the batch brings as much"
# also = ["small_batch"]
# batch = 64
# steps = 50
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "foreach=False"
# new = "fused=True"
# ///
"""A deep, narrow residual network: hundreds of small tensors, which AdamW updates one after the other."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.inner(self.norm(x)))


model = nn.Sequential(nn.Linear(32, 96), *(Residual(96) for _ in range(40)), nn.Linear(96, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, foreach=False)
data = TensorDataset(torch.randn(16384, 32), torch.randn(16384, 1))

# %% the training cell
loader = DataLoader(data, batch_size=64, shuffle=True)
for epoch in range(4):
    running = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
