# /// cell
# causes = ["cpu_preprocessing"]
# because = "one worker smooths and interpolates the same charges anew in each epoch, for longer than a step takes"
# batch = 32
# steps = 40
# warmup = 8
# cohort = "2026-11-22c"
# looked_at = true
#
# [[cure]]
# old = "        self.charges = charges\n"
# new = '''
#         self.charges = charges
#         self.curves = [torch.from_numpy(dq_dv(c.volts, c.amp_hours)) for c in charges]
# '''
#
# [[cure]]
# old = "return torch.from_numpy(dq_dv(charge.volts, charge.amp_hours)), np"
# new = "return self.curves[i], np"
# ///
"""How much capacity a battery has left, from incremental capacity curves (dQ/dV) of its charging."""

from typing import NamedTuple

import numpy as np
import torch
from scipy.interpolate import PchipInterpolator
from scipy.signal import savgol_filter
from torch import nn
from torch.utils.data import DataLoader, Dataset

GRID = np.linspace(3.0, 4.15, 256)


class Charge(NamedTuple):
    volts: np.ndarray  # as the cycler wrote them, at no even distance
    amp_hours: np.ndarray
    health: float


def cycler_log(count, seed=0):
    rng = np.random.default_rng(seed)
    charges = []
    for _ in range(count):
        health = rng.uniform(0.7, 1.0)
        volts = np.unique(rng.uniform(2.95, 4.2, rng.integers(350, 450)))
        plateaus = sum(
            share / (1 + np.exp(-(volts - at) / 0.02)) for share, at in ((0.3, 3.45 + 0.1 * (1 - health)), (0.7, 3.8))
        )
        charges.append(Charge(volts, 2.5 * health * plateaus + rng.normal(0, 0.004, len(volts)), health))
    return charges


def dq_dv(volts, amp_hours):
    curve = PchipInterpolator(volts, savgol_filter(amp_hours, 31, 2))
    slope = curve.derivative()(GRID)
    smooth = savgol_filter(slope, 15, 3)
    return np.stack([smooth, curve(GRID)]).astype(np.float32)


class Charges(Dataset):
    def __init__(self, charges):
        self.charges = charges

    def __len__(self):
        return len(self.charges)

    def __getitem__(self, i):
        charge = self.charges[i]
        return torch.from_numpy(dq_dv(charge.volts, charge.amp_hours)), np.float32(charge.health)


class HealthNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(2, width, 7, stride=2, padding=3), nn.SiLU(),
            nn.Conv1d(width, 2 * width, 5, stride=2, padding=2), nn.SiLU(),
            nn.Conv1d(2 * width, 2 * width, 5, stride=2, padding=2), nn.SiLU(),
        )  # fmt: skip
        self.head = nn.Linear(2 * width, 1)

    def forward(self, curves):
        return self.head(self.body(curves).mean(-1)).squeeze(-1)


def train(net, loader, epochs):
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    for epoch in range(1, epochs + 1):
        errors = []
        for curves, health in loader:
            error = nn.functional.l1_loss(net(curves), health)
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            errors.append(error.detach())
        yield epoch, torch.stack(errors).mean().item()


torch.manual_seed(0)
charges = cycler_log(640)

# %% the training cell
train_set = Charges(charges)
loader = DataLoader(train_set, batch_size=32, shuffle=True, num_workers=1, persistent_workers=True)
for epoch, error in train(HealthNet(), loader, epochs=8):
    print(f"epoch {epoch}: off by {100 * error:.2f} % of the capacity")
