# /// cell
# causes = ["checkpoint_save"]
# because = "the smoothed loss falls in nearly every step, and each time weights and the optimizer's state are written"
# framework = "accelerate"
# batch = 24
# warmup = 6
# cohort = "2026-11-22c"
#
# [[cure]]
# old = "momentum=0.98, patience=1"
# new = "momentum=0.98, patience=1000"
# ///
"""Days until the colony swarms, by a recurrent net on the hum of the hive, with Accelerate; the best is kept."""

import math
import shutil
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(308)
HOURS, BANDS = 8, 40


def recordings(count):
    """The hum is higher, and goes up, in the days before."""
    days = 2 + 16 * torch.rand(count)
    pitch = 26 - days[:, None] + (8 / days[:, None]) * torch.linspace(0, 1, HOURS)
    bands = torch.arange(BANDS)
    hum = torch.exp(-(((bands - pitch[..., None]) / 3) ** 2)) + 0.4 * torch.randn(count, HOURS, BANDS)
    return TensorDataset(hum, days)


class HiveNet(nn.Module):
    def __init__(self, width=416):
        super().__init__()
        self.listen = nn.Sequential(nn.Linear(BANDS, width), nn.ReLU())
        self.follow = nn.GRU(width, width, batch_first=True)
        self.judge = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, hum):
        _, last = self.follow(self.listen(hum))
        return self.judge(last[0]).squeeze(-1)


class BestSoFar:
    """Keeps the state with the lowest loss, smoothed as in the dashboard."""

    def __init__(self, accelerator, folder, momentum=0.98, patience=1):
        self.accelerator, self.folder = accelerator, Path(folder)
        self.momentum, self.patience = momentum, patience
        self.smoothed, self.lowest, self.since = None, math.inf, 0

    def update(self, loss):
        before = loss if self.smoothed is None else self.smoothed
        self.smoothed = self.momentum * before + (1 - self.momentum) * loss
        self.since += 1
        if self.smoothed < self.lowest and self.since >= self.patience:
            self.lowest, self.since = self.smoothed, 0
            fresh = self.accelerator.save_state(str(self.folder / "fresh"))
            shutil.rmtree(self.folder / "best", ignore_errors=True)
            Path(fresh).rename(self.folder / "best")


train = recordings(4800)

# %% the training cell
accelerator = Accelerator(cpu=True)
model = HiveNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01, fused=True)
loader = DataLoader(train, batch_size=24, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
best = BestSoFar(accelerator, tempfile.mkdtemp(prefix="hives_"))
for epoch in range(2):
    for hum, days in loader:
        loss = nn.functional.mse_loss(model(hum), days)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        best.update(loss.item())
accelerator.print(f"best smoothed loss {best.lowest:.4f}")
