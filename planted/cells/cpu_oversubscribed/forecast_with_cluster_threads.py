# /// cell
# causes = ["cpu_oversubscribed"]
# because = "8 threads wait for each other in each small layer"
# batch = 32
# steps = 15
# warmup = 3
# profiled = 30
# fresh = true
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "torch.set_num_threads(8)"
# new = "torch.set_num_threads(1)"
# ///
"""A convolutional forecaster of electricity demand; the number of threads is from the cluster's nodes."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(8)
torch.manual_seed(9)
PAST, AHEAD, METERS = 96, 12, 8


class Demand(Dataset):
    def __init__(self, hours=4000):
        t = torch.arange(hours, dtype=torch.float32)
        day = torch.sin(2 * math.pi * t / 24)[:, None] * torch.rand(METERS)
        week = torch.sin(2 * math.pi * t / 168)[:, None] * torch.rand(METERS)
        self.series = (day + week + 0.1 * torch.randn(hours, METERS)).T.contiguous()

    def __len__(self):
        return self.series.shape[1] - PAST - AHEAD

    def __getitem__(self, i):
        return self.series[:, i : i + PAST], self.series[:, i + PAST : i + PAST + AHEAD]


class CausalBlock(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.pad = nn.ConstantPad1d((2 * dilation, 0), 0.0)
        self.conv = nn.Conv1d(width, 2 * width, 3, dilation=dilation)
        self.mix = nn.Conv1d(width, width, 1)

    def forward(self, x):
        return x + self.mix(nn.functional.glu(self.conv(self.pad(x)), dim=1))


class Forecaster(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.first = nn.Conv1d(METERS, width, 1)
        self.blocks = nn.Sequential(*(CausalBlock(width, 2**k) for k in range(2)))
        self.last = nn.Linear(width, METERS * AHEAD)

    def forward(self, x):
        return self.last(self.blocks(self.first(x))[..., -1]).unflatten(1, (METERS, AHEAD))


def pinball(predicted, actual, quantile=0.7):
    error = actual - predicted
    return torch.maximum(quantile * error, (quantile - 1) * error).mean()


demand = Demand()
forecaster = Forecaster()
optimizer = torch.optim.SGD(forecaster.parameters(), lr=0.05)

# %% the training cell
loader = DataLoader(demand, batch_size=32, shuffle=True, drop_last=True)
for epoch in range(1):
    for past, ahead in loader:
        optimizer.zero_grad()
        loss = pinball(forecaster(past), ahead)
        loss.backward()
        optimizer.step()
