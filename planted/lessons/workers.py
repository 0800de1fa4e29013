# /// cell
# lesson = "03"
# because = "each picture is decompressed and changed when it is asked for, and the GPU needs many at once"
# steps = 60
# small = { SIDE = "24", BATCH = "4", CHANNELS = "4", COUNT = "256" }
# on_cpu = [["num_workers=4", "num_workers=1"], ["num_workers=8", "num_workers=1"]]
#
# [[recording]]
# name = "workers-0"
# causes = ["data_starved"]
# also = ["cpu_preprocessing"]
#
# [[recording]]
# name = "workers-2"
# edits = [["num_workers=0", "num_workers=2, persistent_workers=True"]]
# causes = ["data_starved"]
# also = ["cpu_preprocessing"]
#
# [[recording]]
# name = "workers-4"
# edits = [["num_workers=0", "num_workers=4, persistent_workers=True"]]
#
# [[recording]]
# name = "workers-8"
# edits = [["num_workers=0", "num_workers=8, persistent_workers=True"]]
# ///
"""A network on pictures that are decompressed, mirrored and scaled one by one."""

import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

device = "cuda" if torch.cuda.is_available() else "cpu"
SIDE = 160
BATCH = 64
CHANNELS = 96
COUNT = 16_384


class Pictures(Dataset):
    def __init__(self):
        pixels = np.random.default_rng(0).integers(0, 32, (64, SIDE, SIDE, 3), dtype=np.uint8)
        self.files = [zlib.compress(picture.tobytes(), 1) for picture in pixels]

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        pixels = np.frombuffer(zlib.decompress(self.files[i % 64]), np.uint8).reshape(SIDE, SIDE, 3)
        if i % 2:
            pixels = pixels[:, ::-1]
        scaled = (pixels.astype(np.float32) / 32 - 0.45) / 0.22
        return torch.from_numpy(np.ascontiguousarray(scaled.transpose(2, 0, 1))), i % 10


def block(a, b):
    return nn.Sequential(
        nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
        nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
    )  # fmt: skip


sizes = [3, CHANNELS, 2 * CHANNELS, 4 * CHANNELS, 8 * CHANNELS]
layers = [block(a, b) for a, b in zip(sizes, sizes[1:])]  # noqa: B905, RUF007
net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], 10))
net = net.to(device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)

# %% the training cell
loader = DataLoader(Pictures(), batch_size=BATCH, shuffle=True, pin_memory=device == "cuda", num_workers=0)
for _ in range(10):
    for x, y in loader:
        x = x.to(device, non_blocking=True, memory_format=torch.channels_last)
        y = y.to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16):
            loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
