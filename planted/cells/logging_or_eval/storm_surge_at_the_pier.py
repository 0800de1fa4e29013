# /// cell
# causes = ["logging_or_eval"]
# because = "the whole last winter is forecast after every third step"
# batch = 64
# warmup = 6
# cohort = "2026-11-22b"
#
# [[cure]]
# old = "check_every=3"
# new = "check_every=1000"
# ///
"""Storm surge at a pier six hours ahead, from two days of wind and pressure: convolutions along the hours."""

import numpy as np
import torch
from scipy.signal import lfilter
from torch import nn

torch.manual_seed(73)
noise = np.random.default_rng(73)
HOURS, AHEAD = 48, 6
weather = lfilter([0.15], [1, -0.85], noise.standard_normal((6, 9000)), axis=1).astype(np.float32)
level = lfilter([0.0, 0.0, 0.3, 0.2, 0.1], [1, -0.5], weather[0] - 0.7 * weather[3]).astype(np.float32)


def cut(first, last):
    """Windows of two days, and the levels of the hours that follow."""
    starts = np.arange(first, last - HOURS - AHEAD)
    past = weather[:, starts[:, None] + np.arange(HOURS)].transpose(1, 0, 2)
    future = level[starts[:, None] + HOURS + np.arange(AHEAD)]
    return torch.from_numpy(np.ascontiguousarray(past)), torch.from_numpy(future)


class Surge(nn.Module):
    def __init__(self, channels=48):
        super().__init__()
        self.along = nn.Sequential(
            nn.Conv1d(6, channels, 5, padding=2),
            nn.GELU(),
            nn.Conv1d(channels, channels, 5, padding=4, dilation=2),
            nn.GELU(),
            nn.Conv1d(channels, channels, 5, padding=8, dilation=4),
            nn.GELU(),
        )
        self.head = nn.Linear(channels * 8, AHEAD)

    def forward(self, past):
        found = self.along(past)[..., -8:]
        return self.head(found.flatten(1))


class Forecaster:
    """Trains on the years before, and looks now and then at the last winter."""

    def __init__(self, model, known, winter, *, batch=64, check_every=3):
        self.model, self.known, self.winter = model, known, winter
        self.batch, self.check_every = batch, check_every
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
        self.curve = []

    def fit(self, steps):
        past, future = self.known
        for step in range(1, steps + 1):
            rows = torch.randint(0, len(past), (self.batch,))
            loss = nn.functional.mse_loss(self.model(past[rows]), future[rows])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if step % self.check_every == 0:
                self.curve.append((step, self.error()))

    @torch.no_grad()
    def error(self):
        self.model.eval()
        past, future = self.winter
        squared = 0.0
        for some, truth in zip(past.split(256), future.split(256), strict=True):
            squared += (self.model(some) - truth).square().sum().item()
        self.model.train()
        return (squared / future.numel()) ** 0.5


known, winter = cut(0, 7200), cut(7200, 9000)

# %% the training cell
forecaster = Forecaster(Surge(), known, winter)
forecaster.fit(steps=240)
best = min(error for _, error in forecaster.curve) if forecaster.curve else None
