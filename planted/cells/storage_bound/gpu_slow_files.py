# /// cell
# causes = ["storage_bound"]
# because = "each of 32 pictures waits 2 ms, one after the other"
# also = ["data_starved"]
# gpu = true
# batch = 32
# steps = 24
# warmup = 20
# cohort = "2026-11-21e"
#
# [[cure]]
# old = "num_workers=0"
# new = "num_workers=8, persistent_workers=True"
# ///
"""A ResNet-like network on the GPU, and each picture waits for the file server."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

device = "cuda"


class Pictures(Dataset):
    def __init__(self):
        self.pixels = torch.randn(64, 3, 128, 128)

    def __len__(self):
        return 4096

    def __getitem__(self, i):
        time.sleep(0.002)  # stands for the file server
        return self.pixels[i % 64], i % 10


def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())


net = nn.Sequential(
    block(3, 64), block(64, 128), block(128, 256), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)
)
net = net.to(device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)

# %% the training cell
loader = DataLoader(Pictures(), batch_size=32, shuffle=True, num_workers=0, pin_memory=True)
for epoch in range(4):
    for x, y in loader:
        x = x.to(device, non_blocking=True, memory_format=torch.channels_last)
        y = y.to(device, non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
