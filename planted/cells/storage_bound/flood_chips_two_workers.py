# /// cell
# causes = ["storage_bound"]
# because = "two requests of 6 ms for each of 12 chips, and two workers to wait for them"
# also = ["data_starved"]
# batch = 12
# steps = 36
# warmup = 18
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = "num_workers=2"
# new = "num_workers=8"
# ///
"""Flood maps from satellite chips in a bucket: two workers for requests that take their time."""

import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

torch.manual_seed(44)
CHIPS, BANDS, PIXELS = 240, 6, 32


class Bucket:
    """Client of the object store. Each request has to travel."""

    def __init__(self, root, latency=0.006):
        self.root, self.latency = Path(root), latency
        self.root.mkdir(exist_ok=True)

    def put(self, key, array):
        (self.root / key).write_bytes(array.tobytes())

    def get(self, key):
        time.sleep(self.latency)
        return (self.root / key).read_bytes()


bucket = Bucket("sen1floods")
rng = np.random.default_rng(44)
for i in range(CHIPS):
    water = rng.random((PIXELS, PIXELS)) < rng.uniform(0.1, 0.6)
    bands = rng.integers(0, 4000, (BANDS, PIXELS, PIXELS)) - 1500 * water * np.array([0, 0, 0, 1, 1, 1])[:, None, None]
    bucket.put(f"chip_{i:03}.s2", np.clip(bands, 0, None).astype(np.uint16))
    bucket.put(f"chip_{i:03}.label", water.astype(np.uint8))


class FloodChips(Dataset):
    def __init__(self, bucket, count):
        self.bucket, self.count = bucket, count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        image = np.frombuffer(self.bucket.get(f"chip_{i:03}.s2"), np.uint16).reshape(BANDS, PIXELS, PIXELS)
        label = np.frombuffer(self.bucket.get(f"chip_{i:03}.label"), np.uint8).reshape(PIXELS, PIXELS)
        return torch.from_numpy(image.astype(np.float32) / 4000), torch.from_numpy(label.astype(np.float32))


def conv(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


class FloodNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = conv(BANDS, 16), conv(16, 32, 2), conv(32, 32)
        self.head = nn.Conv2d(48, 1, 1)

    def forward(self, x):
        a = self.a(x)
        c = F.interpolate(self.c(self.b(a)), scale_factor=2)
        return self.head(torch.cat([a, c], 1)).squeeze(1)


def dice_loss(logits, target):
    p = torch.sigmoid(logits)
    overlap = (p * target).sum((1, 2))
    return (1 - (2 * overlap + 1) / (p.sum((1, 2)) + target.sum((1, 2)) + 1)).mean()


net = FloodNet()
optim = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)

# %% the training cell
train_part, held_out = random_split(FloodChips(bucket, CHIPS), [0.9, 0.1], torch.Generator().manual_seed(1))
train_loader = DataLoader(
    train_part,
    batch_size=12,
    shuffle=True,
    num_workers=2,
    persistent_workers=True,
)

for epoch in range(10):
    for image, label in train_loader:
        logits = net(image)
        loss = dice_loss(logits, label) + F.binary_cross_entropy_with_logits(logits, label)
        optim.zero_grad()
        loss.backward()
        optim.step()
