# /// cell
# causes = []
# because = "matrix products on two thousand frames take the step; the hums lie in memory"
# framework = "accelerate"
# batch = 40
# steps = 16
# warmup = 3
# tries = { workers = "2", batch_size = "80" }
# cohort = "2026-11-22c"
# ///
"""Which thread of the loom is about to break, heard from its hum: wide layers on spliced frames, with Accelerate."""

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass(frozen=True)
class Run:
    frames: int = 48
    bands: int = 40
    splice: int = 5
    width: int = 512
    depth: int = 3
    threads: int = 6
    batch: int = 40
    epochs: int = 3
    seed: int = 1201


run = Run()
set_seed(run.seed)


def hums(count):
    thread = torch.randint(0, run.threads, (count,))
    pitch = 5 + 6 * thread[:, None, None] + torch.randn(count, 1, 1)
    beat = torch.sin(torch.arange(run.frames) * (0.2 + 0.1 * torch.rand(count, 1, 1)))
    bands = torch.arange(run.bands)[:, None]
    hum = torch.exp(-(((bands - pitch) / 3) ** 2)) * (1 + beat) + 0.3 * torch.randn(count, run.bands, run.frames)
    spliced = hum.unfold(2, run.splice, 1).permute(0, 2, 1, 3).flatten(2)  # each frame with those around it
    return spliced.contiguous(), thread


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.frame = nn.Linear(run.bands * run.splice, run.width)
        self.deeper = nn.Sequential(*(Residual(run.width) for _ in range(run.depth)))
        self.thread = nn.Linear(run.width, run.threads)

    def forward(self, hum):
        return self.thread(self.deeper(self.frame(hum)).mean(1))


sound, thread = hums(3200)

# %% the training cell
accelerator = Accelerator(cpu=True)
listener, optimizer, loader = accelerator.prepare(
    net := Listener(),
    torch.optim.Adam(net.parameters(), lr=3e-4, fused=True),
    DataLoader(TensorDataset(sound, thread), batch_size=run.batch, shuffle=True),
)
for epoch in range(run.epochs):
    losses = torch.zeros(len(loader))
    for i, (hum, broke) in enumerate(loader):
        loss = nn.functional.cross_entropy(listener(hum), broke)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses[i] = loss.detach()
    accelerator.print(f"epoch {epoch}: {losses.mean():.3f}")
