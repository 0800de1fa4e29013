# /// cell
# causes = ["memory_bound_ops"]
# because = "an activation of a dozen operations on half a million numbers, each of which goes through memory"
# batch = 4
# steps = 12
# warmup = 3
# cohort = "2026-11-21d"
#
# [[cure]]
# old = "periodic = snake"
# new = "periodic = torch.compile(snake)"
# ///
"""A vocoder makes sound from mel bands; its periodic activation ("snake") is written as its paper has it."""

import torch
from torch import nn

torch.manual_seed(33)
MELS, FRAMES, HOP, CLIPS = 20, 64, 128, 160


def snake(x, a=2.0):
    """x + sin²(ax) / a, less what a slow wave would add far from zero"""
    wave = torch.sin(x * a)
    return x + (1.0 / a) * torch.pow(wave, 2) - 0.1 * x / (1.0 + x * x) * (1.0 - 0.5 * wave)


periodic = snake


class Vocoder(nn.Module):
    """Each frame is spread over its samples, which are then shaped one by one."""

    def __init__(self, width=16, depth=3):
        super().__init__()
        self.spread = nn.ConvTranspose1d(MELS, width, HOP, stride=HOP)
        self.shape = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth - 1))
        self.last = nn.Conv1d(width, 1, 1)

    def forward(self, mel):
        x = periodic(self.spread(mel))
        for shape in self.shape:
            x = periodic(shape(x))
        return torch.tanh(self.last(x)).squeeze(1)


mels = torch.randn(CLIPS, MELS, FRAMES)
sounds = torch.tanh(torch.randn(CLIPS, FRAMES * HOP).cumsum(1) * 0.05)
vocoder = Vocoder()

# %% the training cell
optimizer = torch.optim.AdamW(vocoder.parameters(), lr=5e-4, betas=(0.8, 0.99), fused=True)
decay = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.7)
for epoch in range(10):
    for part in torch.randperm(CLIPS).split(4):
        made = vocoder(mels[part])
        loss = (made - sounds[part]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
