# /// cell
# causes = ["storage_bound", "unfused_optimizer"]
# because = "40 ms of waiting for ten files, then 164 tensors updated one by one"
# also = ["data_starved"]
# batch = 10
# steps = 24
# warmup = 16
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "num_workers=0"
# new = "num_workers=6, persistent_workers=True"
#
# [[second_cure]]
# old = "foreach=False"
# new = "fused=True"
# ///
"""Slow files, and behind them an optimizer that goes through two hundred small tensors one by one."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Readings(Dataset):
    def __init__(self, count):
        self.x, self.y = torch.randn(count, 24), torch.randn(count, 1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        time.sleep(0.004)  # stands for a file on a tape library
        return self.x[i], self.y[i]


torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(24, 48), *(nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(80)), nn.Linear(48, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

# %% the training cell
loader = DataLoader(Readings(640), batch_size=10, shuffle=True, num_workers=0)
for epoch in range(8):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
