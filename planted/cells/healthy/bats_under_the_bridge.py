# /// cell
# causes = []
# because = "a step is convolutions, and two workers are ahead of it with little work"
# batch = 16
# steps = 20
# warmup = 8
# tries = { workers = "4", batch_size = "32" }
# cohort = "2026-11-22c"
# ///
"""Bats named from their calls: two workers cut a piece of each recording and add noise, a 1d ResNet listens."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SPECIES = ["noctule", "pipistrelle", "serotine", "barbastelle", "Daubenton's"]
PIECE = 4096


class Calls(Dataset):
    def __init__(self, recordings, species, louder=(0.5, 2.0)):
        self.recordings, self.species, self.louder = recordings, species, louder

    def __len__(self):
        return len(self.species)

    def __getitem__(self, i):
        recording = self.recordings[i]
        start = int(torch.randint(0, len(recording) - PIECE, ()))
        piece = torch.from_numpy(recording[start : start + PIECE]).float()
        gain = torch.empty(()).uniform_(*self.louder)
        return (gain * piece + 0.02 * torch.randn(PIECE))[None], self.species[i]


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv1d(width, width, 9, padding=4), nn.ReLU(), nn.Conv1d(width, width, 9, padding=4)
        )

    def forward(self, x):
        return torch.relu(x + self.inner(x))


def listener(width=96):
    return nn.Sequential(
        nn.Conv1d(1, width, 32, stride=16, padding=8),
        nn.ReLU(),
        Residual(width),
        nn.Conv1d(width, 2 * width, 4, stride=4),
        Residual(2 * width),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(2 * width, len(SPECIES)),
    )


rng = np.random.default_rng(40)
species = rng.integers(0, len(SPECIES), 2400).tolist()
times = np.arange(6000, dtype=np.float32) / 6000
tones = np.stack([np.sin(2 * np.pi * (300 + 150 * s) * times * (1 - 0.3 * times)) for s in range(len(SPECIES))])
recordings = (tones[species] * rng.uniform(0.1, 1, (2400, 1))).astype(np.float16)

torch.manual_seed(40)
model = listener()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

# %% the training cell
calls = DataLoader(
    Calls(recordings, species), batch_size=16, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=4
)
model.train()
for epoch in range(1):
    for n, (waves, kinds) in enumerate(calls):
        loss = nn.functional.cross_entropy(model(waves), kinds)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if n % 40 == 0:
            print(f"{epoch}:{n} {loss.item():.3f}")
