# /// cell
# causes = ["cpu_preprocessing"]
# because = "decompressing and averaging a row takes longer than training on it"
# also = ["data_starved"]
# framework = "accelerate"
# batch = 32
# steps = 24
# warmup = 12
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "DataLoader(Rows(PACKED)"
# new = "DataLoader(Unpacked(PACKED)"
# ///
"""Rows are kept compressed in memory and decompressed for each batch; Accelerate."""

import zlib

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

rng = np.random.default_rng(0)
PACKED = [zlib.compress(rng.integers(0, 6, 60_000, dtype=np.uint8).tobytes(), 6) for _ in range(256)] * 8


class Rows(Dataset):
    def __init__(self, packed):
        self.packed = packed

    def __len__(self):
        return len(self.packed)

    def __getitem__(self, i):
        row = np.frombuffer(zlib.decompress(self.packed[i]), np.uint8)
        return torch.from_numpy(row.reshape(60, 1000).mean(1, dtype=np.float32))


class Unpacked(Rows):
    def __init__(self, packed):
        rows = Rows(packed)
        self.packed = [rows[i] for i in range(len(rows))]

    def __getitem__(self, i):
        return self.packed[i]


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(60, 128), nn.ReLU(), nn.Linear(128, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 60))

    def forward(self, x):
        return self.decoder(self.encoder(x))


# %% the training cell
accelerator = Accelerator(cpu=True)
model = Autoencoder()
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
model, opt, data = accelerator.prepare(model, opt, DataLoader(Rows(PACKED), batch_size=32, shuffle=True))
for epoch in range(4):
    for batch in data:
        loss = nn.functional.mse_loss(model(batch), batch)
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
