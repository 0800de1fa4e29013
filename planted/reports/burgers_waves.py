# /// cell
# cohort = "fourth"
# because = "healthy"
# ///
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(47)

POINTS, WIDTH, MODES, BATCH, SAMPLES = 512, 24, 24, 32, 512

grid = torch.arange(POINTS) / POINTS
freq = torch.arange(1, 9).float()
amp = torch.randn(SAMPLES, 8) / freq
phase = 2 * math.pi * torch.rand(SAMPLES, 8)
start = (amp[:, :, None] * torch.sin(2 * math.pi * freq[:, None] * grid + phase[:, :, None])).sum(1)
damp = torch.exp(-0.05 * freq ** 2)
final = (amp[:, :, None] * damp[:, None]
         * torch.sin(2 * math.pi * freq[:, None] * (grid - 0.1) + phase[:, :, None])).sum(1)
final = final - 0.1 * final * final.roll(1, dims=1)


class SpectralConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(MODES, WIDTH, WIDTH, dtype=torch.cfloat) / WIDTH)

    def forward(self, x):
        spec = torch.fft.rfft(x, dim=-1)
        low = spec[..., :MODES].permute(2, 0, 1) @ self.weight
        return torch.fft.irfft(low.permute(1, 2, 0), n=x.size(-1), dim=-1)


class FNO(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Conv1d(2, WIDTH, 1)
        self.spectral = nn.ModuleList(SpectralConv() for _ in range(4))
        self.local = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(4))
        self.project = nn.Sequential(nn.Conv1d(WIDTH, 64, 1), nn.GELU(), nn.Conv1d(64, 1, 1))

    def forward(self, u):
        x = torch.stack([u, grid.expand_as(u)], dim=1)
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local):
            x = F.gelu(spectral(x) + local(x))
        return self.project(x).squeeze(1)


model = FNO()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

# %% the training cell
for epoch in range(24):
    for part in torch.randperm(SAMPLES).split(BATCH):
        optimizer.zero_grad()
        pred = model(start[part])
        error = (pred - final[part]).norm(dim=1) / final[part].norm(dim=1)
        loss = error.mean()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} relative error {loss.item():.4f}")
