# /// cell
# lesson = "15"
# because = "pictures are made one by one beside the training, and the GPU waits for them most of the time"
# steps = 40
# small = { SIDE = "16", BATCH = "4", CHANNELS = "4", COUNT = "256" }
# on_cpu = [["num_workers=12, prefetch_factor=4", "num_workers=1"], ["pin_memory=True, ", ""]]
#
# [[recording]]
# name = "capstone-before"
# causes = ["data_starved"]
# also = ["cpu_preprocessing"]
#
# [[recording]]
# name = "capstone-after"
# because = "workers and pinned memory, bf16 with the channels last, a fused update, no figure in each step"
# edits = [
#     ["shuffle=True)", "shuffle=True, pin_memory=True, num_workers=12, prefetch_factor=4, persistent_workers=True)"],
#     [
#         "        x, y = x.to(device), y.to(device)\n",
#         '''
#         x = x.to(device, non_blocking=True, memory_format=torch.channels_last)
#         y = y.to(device, non_blocking=True)
# ''',
#     ],
#     ["        loss = nn.functional.cross_entropy(net(x), y)\n", '''
#         with torch.autocast(device, torch.bfloat16):
#             loss = nn.functional.cross_entropy(net(x), y)
# '''],
#     ["        losses.append(loss.item())\n", "        losses.append(loss.detach())\n"],
#     ["net = net.to(device)", "net = net.to(device, memory_format=torch.channels_last)"],
#     ["lr=1e-3)", "lr=1e-3, fused=True)"],
# ]
# ///
"""A classifier of pictures, as many people would write it first."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

device = "cuda" if torch.cuda.is_available() else "cpu"
SIDE = 128
BATCH = 128
CHANNELS = 128
COUNT = 32_768


class Pictures(Dataset):
    def __init__(self):
        self.pixels = np.random.default_rng(0).integers(0, 256, (64, 3, SIDE, SIDE), dtype=np.uint8)

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        pixels = np.roll(self.pixels[i % 64], i % 17, axis=2)
        scaled = (pixels.astype(np.float32) / 255 - 0.45) / 0.22
        noisy = scaled + 0.01 * np.random.default_rng(i).standard_normal(scaled.shape, dtype=np.float32)
        return torch.from_numpy(noisy), i % 10


def block(a, b):
    return nn.Sequential(
        nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
        nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
    )  # fmt: skip


blocks = [block(3, CHANNELS), block(CHANNELS, 2 * CHANNELS), block(2 * CHANNELS, 4 * CHANNELS)]
net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * CHANNELS, 10))
net = net.to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

# %% the training cell
loader = DataLoader(Pictures(), batch_size=BATCH, shuffle=True)
losses = []
for _ in range(10):
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
