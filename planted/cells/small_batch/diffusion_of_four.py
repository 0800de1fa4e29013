# /// cell
# causes = ["small_batch"]
# because = "a step for 4 curves costs nearly as much as one for 64"
# batch = 4
# cured_batch = 64
# steps = 100
# warmup = 10
# profiled = 400
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "batch_size=4"
# new = "batch_size=64"
# ///
"""A small diffusion model of curves, trained on four curves at a time."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)
t = torch.linspace(0, 1, 32)
phases = torch.rand(6000, 1)
curves = TensorDataset(torch.sin(2 * math.pi * (t + phases)) * torch.rand(6000, 1))

TIMES = 200
alpha_bar = torch.cos(torch.linspace(0, 1, TIMES + 1)[1:] * math.pi / 2.05) ** 2


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.register_buffer("frequencies", torch.exp(torch.linspace(0, 4, 16)))
        self.when = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.into = nn.Linear(32, width)
        self.middle = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.out = nn.Linear(width, 32)

    def forward(self, x, time):
        angle = time[:, None] / TIMES * self.frequencies
        when = self.when(torch.cat([angle.sin(), angle.cos()], 1))
        h = self.into(x)
        for layer in self.middle:
            h = h + nn.functional.silu(layer(h + when))
        return self.out(h)


denoiser = Denoiser()
optimizer = torch.optim.AdamW(denoiser.parameters(), lr=1e-3, fused=True)

# %% the training cell
for epoch in range(2):
    for (clean,) in DataLoader(curves, batch_size=4, shuffle=True):
        time = torch.randint(TIMES, (len(clean),))
        noise = torch.randn_like(clean)
        signal = alpha_bar[time].unsqueeze(1)
        noisy = signal.sqrt() * clean + (1 - signal).sqrt() * noise
        loss = (denoiser(noisy, time) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(denoiser.parameters(), 1.0)
        optimizer.step()
