# /// cell
# causes = ["storage_bound"]
# because = "nearly each particle's micrograph is waited for 3 ms in the process that trains, as few are kept"
# batch = 16
# warmup = 6
# cohort = "2026-11-22c"
#
# [[cure]]
# old = "batch_size=16, shuffle=True"
# new = "batch_size=16, shuffle=True, num_workers=4, persistent_workers=True"
# ///
"""Cryo-EM particles are rated good or bad by a small ResNet; the micrographs they are cut from lie on the lab's NAS."""

import functools
import os
import tempfile
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(2017)
BOX, SIDE = 32, 256


def collect(folder, micrographs=60, per_micrograph=20):
    """What a session at the microscope leaves behind: a file per micrograph, and a list of picks."""
    rng = np.random.default_rng(2017)
    y, x = np.mgrid[:BOX, :BOX] - BOX // 2
    blob = 1.5 * np.exp(-(x**2 + y**2) / 60)
    picks = []
    for m in range(micrographs):
        sheet = rng.normal(0, 1, (SIDE, SIDE)).astype(np.float32)
        for _ in range(per_micrograph):
            top, left = rng.integers(0, SIDE - BOX, 2)
            good = bool(rng.random() < 0.5)
            if good:
                sheet[top : top + BOX, left : left + BOX] += blob
            picks.append((f"mic_{m:04d}.raw", int(top), int(left), good))
        sheet.astype(np.float16).tofile(os.path.join(folder, f"mic_{m:04d}.raw"))
    return picks


def nas_read(path):
    time.sleep(0.003)  # the NAS is two buildings away
    return np.fromfile(path, dtype=np.float16).reshape(SIDE, SIDE)


class Picks(Dataset):
    def __init__(self, folder, picks, keep=6):
        self.folder, self.picks = folder, picks
        self.micrograph = functools.lru_cache(maxsize=keep)(self._open)

    def _open(self, name):
        return nas_read(os.path.join(self.folder, name))

    def __len__(self):
        return len(self.picks)

    def __getitem__(self, i):
        name, top, left, good = self.picks[i]
        box = self.micrograph(name)[top : top + BOX, left : left + BOX].astype(np.float32)
        return torch.from_numpy(box)[None], float(good)


class Block(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.a = nn.Conv2d(n_in, n_out, 3, stride=2, padding=1)
        self.b = nn.Conv2d(n_out, n_out, 3, padding=1)
        self.skip = nn.Conv2d(n_in, n_out, 1, stride=2)

    def forward(self, x):
        return F.relu(self.skip(x) + self.b(F.relu(self.a(x))))


folder = tempfile.mkdtemp()
picks = collect(folder)
layers = [Block(1, 16), Block(16, 32), Block(32, 64)]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

# %% the training cell
train_loader = DataLoader(Picks(folder, picks), batch_size=16, shuffle=True, drop_last=True)
history = []
for epoch in range(2):
    model.train()
    for boxes, good in train_loader:
        loss = F.binary_cross_entropy_with_logits(model(boxes).squeeze(1), good.float())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        history.append(loss.detach())
    print(epoch, torch.stack(history[-len(train_loader) :]).mean().item())
