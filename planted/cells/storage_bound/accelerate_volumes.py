# /// cell
# causes = ["storage_bound"]
# because = "each of 10 crops waits 4 ms for its pages, one after the other"
# also = ["data_starved"]
# framework = "accelerate"
# batch = 10
# steps = 24
# warmup = 12
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = "shuffle=True)"
# new = "shuffle=True, num_workers=4, persistent_workers=True)"
# ///
"""Volumes cut from one large memory-mapped file; reading a slice waits for the array server. Accelerate."""

import time

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

volume = np.memmap("volume.dat", dtype=np.float32, mode="w+", shape=(800, 1, 12, 12, 12))
volume[:] = np.random.default_rng(0).standard_normal(volume.shape, dtype=np.float32)


class Crops(Dataset):
    def __len__(self):
        return len(volume)

    def __getitem__(self, i):
        time.sleep(0.004)  # stands for pages that have to come from the array server
        crop = torch.from_numpy(np.array(volume[i]))
        return crop, crop.mean().reshape(1)


net = nn.Sequential(
    nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(),
    nn.Linear(8 * 12**3, 1),
)  # fmt: skip

# %% the training cell
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
loader = DataLoader(Crops(), batch_size=10, shuffle=True)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for epoch in range(4):
    for crop, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(crop), target)
        accelerator.backward(loss)
        optimizer.step()
