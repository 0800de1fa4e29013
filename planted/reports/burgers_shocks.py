# /// cell
# cohort = "fourth"
# because = "healthy"
# faster = 1.0
# ///
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
points, samples, batch_size = 1024, 960, 32


def solve_waves(n):
    rng = np.random.default_rng(4)
    modes = np.arange(1, 9)
    x = np.linspace(0, 2 * np.pi, points, endpoint=False)
    weight = rng.normal(size=(n, 8, 1)) / modes[:, None]
    phase = rng.uniform(0, 2 * np.pi, (n, 8, 1))
    start = (weight * np.sin(modes[:, None] * x + phase)).sum(1)
    k = np.fft.rfftfreq(points, 1 / points)
    start = 0.5 * start / start.std(1, keepdims=True)
    u = start.copy()
    for _ in range(100):
        hat = np.fft.rfft(u)
        slope = np.fft.irfft(1j * k * hat, n=points)
        hat = (hat - 0.005 * np.fft.rfft(u * slope)) / (1 + 0.005 * 0.02 * k ** 2)
        hat[:, points // 3:] = 0
        u = np.fft.irfft(hat, n=points)
    return torch.from_numpy(start).float(), torch.from_numpy(u).float()


class SpectralConv(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(modes, width, width, dtype=torch.cfloat) / width)

    def forward(self, x):
        hat = torch.fft.rfft(x)
        low = torch.einsum("bcm,mcd->bdm", hat[:, :, :self.modes], self.weight)
        return torch.fft.irfft(low, n=x.shape[-1])


class FourierOperator(nn.Module):
    def __init__(self, width=20, modes=24, depth=4):
        super().__init__()
        self.lift = nn.Conv1d(2, width, 1)
        self.spectral = nn.ModuleList([SpectralConv(width, modes) for _ in range(depth)])
        self.local = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in range(depth)])
        self.head = nn.Conv1d(width, 1, 1)

    def forward(self, x):
        h = self.lift(x)
        for spectral, local in zip(self.spectral, self.local):
            h = F.relu(spectral(h) + local(h))
        return self.head(h).squeeze(1)


start, final = solve_waves(samples)
grid = torch.linspace(0, 1, points).expand(samples, points)
inputs = torch.stack([start, grid], dim=1)
model = FourierOperator()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

# %% the training cell
for epoch in range(12):
    order = torch.randperm(samples)
    total = 0.0
    for i in range(0, samples, batch_size):
        chosen = order[i:i + batch_size]
        loss = F.mse_loss(model(inputs[chosen]), final[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(chosen)
    print(f"epoch {epoch} loss {total / samples:.5f}")
