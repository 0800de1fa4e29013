# /// cell
# causes = ["worker_restart"]
# because = "an epoch of 6 steps of a few milliseconds, and each starts two processes anew"
# batch = 32
# steps = 60
# warmup = 6
# profiled = 90
# cohort = "2026-11-21d"
#
# [[cure]]
# old = "prefetch_factor=2"
# new = "prefetch_factor=2, persistent_workers=True"
# ///
"""A variational autoencoder learns how healthy bearings sound; there are few recordings, so it takes many epochs."""

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(6205)


@dataclass
class Config:
    window: int = 512
    latent: int = 16
    batch_size: int = 32
    epochs: int = 60
    lr: float = 1e-3
    beta: float = 0.1
    ema: float = 0.99


class Vibration(Dataset):
    """A window from anywhere in a recording."""

    def __init__(self, recordings, window):
        self.recordings, self.window = recordings, window

    def __len__(self):
        return len(self.recordings)

    def __getitem__(self, i):
        start = int(torch.randint(self.recordings.shape[1] - self.window, ()))
        return self.recordings[i, start : start + self.window]


class VAE(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(cfg.window, 384), nn.ReLU(), nn.Linear(384, 2 * cfg.latent))
        self.decoder = nn.Sequential(nn.Linear(cfg.latent, 384), nn.ReLU(), nn.Linear(384, cfg.window))

    def forward(self, x):
        mean, log_var = self.encoder(x).chunk(2, dim=-1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
        divergence = 0.5 * (mean.pow(2) + log_var.exp() - 1 - log_var).sum(-1).mean()
        return self.decoder(z), divergence


class Engine:
    def __init__(self, model, cfg):
        self.model, self.cfg = model, cfg
        self.averaged = copy.deepcopy(model).requires_grad_(False)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr, fused=True)
        self.losses = []

    def step(self, x):
        rebuilt, divergence = self.model(x)
        loss = (rebuilt - x).pow(2).sum(-1).mean() + self.cfg.beta * divergence
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        for average, now in zip(self.averaged.parameters(), self.model.parameters(), strict=True):
            average.lerp_(now.detach(), 1 - self.cfg.ema)
        return loss.detach()

    def fit(self, loader):
        for _ in range(self.cfg.epochs):
            self.losses.append(torch.stack([self.step(x) for x in loader]).mean())
        return self


cfg = Config()
t = torch.arange(4096) / 12_000
speeds = 25 + 5 * torch.rand(192, 1)
recordings = torch.sin(2 * torch.pi * speeds * t) + 0.3 * torch.sin(2 * torch.pi * 7.9 * speeds * t)
recordings += 0.1 * torch.randn_like(recordings)

# %% the training cell
loader = DataLoader(
    Vibration(recordings, cfg.window),
    batch_size=cfg.batch_size,
    shuffle=True,
    num_workers=2,
    prefetch_factor=2,
)
engine = Engine(VAE(cfg), cfg).fit(loader)
print(f"from {engine.losses[0]:.2f} to {engine.losses[-1]:.2f}")
