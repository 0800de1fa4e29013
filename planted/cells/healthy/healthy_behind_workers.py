# /// cell
# causes = []
# because = "two workers wait for the disk while the last batch is trained on"
# batch = 24
# steps = 16
# warmup = 6
# tries = { workers = "4", fused_optimizer = "True" }
# cohort = "2026-11-21a"
# looked_at = true
# ///
"""Files wait for the disk, but two workers do so while the last batch is trained on."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Scans(Dataset):
    def __init__(self, count):
        self.scans = torch.randn(count, 16, 16, 16)

    def __len__(self):
        return len(self.scans)

    def __getitem__(self, i):
        time.sleep(0.0005)  # stands for the disk
        return self.scans[i], i % 10


model = nn.Sequential(
    nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 96, 3, padding=1), nn.ReLU(),
    nn.Conv2d(96, 96, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(96 * 64, 10),
).to(memory_format=torch.channels_last)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)

# %% the training cell
loader = DataLoader(Scans(1024), batch_size=24, shuffle=True, num_workers=2, persistent_workers=True, drop_last=True)
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(memory_format=torch.channels_last)), y).backward()
        optimizer.step()
