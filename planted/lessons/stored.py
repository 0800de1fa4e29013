# /// cell
# lesson = "04"
# because = "a compressed file per picture is opened and decompressed in every epoch; once would do"
# steps = 60
# small = { SIDE = "16", COUNT = "256", BATCH = "4", CHANNELS = "4" }
# on_cpu = [["num_workers=4", "num_workers=1"]]
#
# [[recording]]
# name = "stored-files"
# causes = ["data_starved"]
# also = ["cpu_preprocessing", "storage_bound"]
#
# [[recording]]
# name = "stored-memmap"
# because = "the pictures were decompressed once, into one array on the disk that is read in place"
# edits = [
#     ['''
# class Pictures(Dataset):
#     """One compressed file per picture."""
#
#     def __len__(self):
#         return COUNT
#
#     def __getitem__(self, i):
#         return torch.from_numpy(np.load(f"pictures/{i}.npz")["pixels"]), i % 10
# ''', '''
# once = np.lib.format.open_memmap("pictures.npy", "w+", np.uint8, (COUNT, 3, SIDE, SIDE))
# for i in range(COUNT):
#     once[i] = np.load(f"pictures/{i}.npz")["pixels"]
# once.flush()
#
#
# class Pictures(Dataset):
#     """All pictures in one array, read where they lie."""
#
#     def __init__(self):
#         self.pixels = np.load("pictures.npy", mmap_mode="r")
#
#     def __len__(self):
#         return COUNT
#
#     def __getitem__(self, i):
#         return torch.from_numpy(self.pixels[i].copy()), i % 10
# '''],
# ]
# ///
"""Pictures from the disk, as bytes; the GPU makes numbers of them."""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

device = "cuda" if torch.cuda.is_available() else "cpu"
SIDE = 224
COUNT = 512
BATCH = 64
CHANNELS = 64
Path("pictures").mkdir(exist_ok=True)
pixels = np.random.default_rng(0).integers(0, 32, (8, 3, SIDE, SIDE), dtype=np.uint8)
for i in range(COUNT):
    np.savez_compressed(f"pictures/{i}.npz", pixels=pixels[i % 8])


class Pictures(Dataset):
    """One compressed file per picture."""

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        return torch.from_numpy(np.load(f"pictures/{i}.npz")["pixels"]), i % 10


def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())


sizes = [3, CHANNELS, 2 * CHANNELS, 4 * CHANNELS]
layers = [block(a, b) for a, b in zip(sizes, sizes[1:])]  # noqa: B905, RUF007
net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], 10))
net = net.to(device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)

# %% the training cell
loader = DataLoader(
    Pictures(), batch_size=BATCH, shuffle=True, pin_memory=device == "cuda", num_workers=4, persistent_workers=True
)
for _ in range(100):
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16):
            x = (x.float() / 32 - 0.45).to(memory_format=torch.channels_last)
            loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
