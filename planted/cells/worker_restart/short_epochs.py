# /// cell
# causes = ["worker_restart"]
# because = "an epoch of 8 steps of a few milliseconds, and each starts two processes anew"
# batch = 32
# steps = 64
# warmup = 8
# profiled = 100
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "num_workers=2)"
# new = "num_workers=2, persistent_workers=True)"
# ///
"""A small dataset, many epochs, and new worker processes for each of them."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(256, 1, 28, 28)
y = torch.randint(0, 10, (256,))
net = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
opt = torch.optim.SGD(net.parameters(), lr=0.05)

# %% the training cell
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, num_workers=2)

for epoch in range(200):
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(net(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
