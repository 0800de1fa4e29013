# /// cell
# causes = []
# because = "matrix products take the step; logging and saving are seldom"
# framework = "accelerate"
# batch = 480
# steps = 10
# warmup = 3
# tries = { workers = "2", fused_optimizer = "True", batch_size = "960" }
# cohort = "2026-11-21d"
# ///
"""Stellar spectra, denoised by wide layers; a line every 40 steps and all states every 80; Accelerate."""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(101)
CHANNELS = 512


def spectra(count):
    place = torch.linspace(0, 1, CHANNELS)
    lines = sum(torch.exp(-((place - torch.rand(count, 1)) ** 2) / 1e-4) for _ in range(6))
    return 1 - 0.3 * lines


class Residual(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


clean = spectra(5760)
data = TensorDataset(clean + 0.1 * torch.randn_like(clean), clean)

# %% the training cell
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
model = nn.Sequential(Residual(CHANNELS, 768), Residual(CHANNELS, 768))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
loader = DataLoader(data, batch_size=480, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
folder, step = tempfile.mkdtemp(), 0
for epoch in range(10):
    for noisy, target in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.l1_loss(model(noisy), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step % 40 == 0:
            accelerator.print(f"{step:4} {loss.item():.4f}")
        if step % 80 == 0:
            accelerator.save_state(folder)
