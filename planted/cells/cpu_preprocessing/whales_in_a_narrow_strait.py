# /// cell
# causes = ["cpu_preprocessing"]
# because = "echoes are added by a convolution sample by sample; by Fourier transforms it takes a tenth of that"
# batch = 16
# steps = 20
# cohort = "2026-11-22b"
#
# [[cure]]
# old = "np.convolve(self.heard[i], self.echoes())"
# new = "signal.fftconvolve(self.heard[i], self.echoes())"
# ///
"""Whales named by their calls; each call is heard with other echoes off the sea bed whenever it comes up."""

import numpy as np
import torch
import torch.nn as nn
from scipy import signal
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(33)
SPECIES = 5
LENGTH = 12_000
ECHO = 4_000


def calls(count):
    """Sweeps whose direction and curve tell the species."""
    rng = np.random.default_rng(33)
    species = rng.integers(0, SPECIES, count)
    seconds = np.linspace(0, 1, LENGTH)
    heard = np.empty((count, LENGTH), np.float32)
    for i, kind in enumerate(species):
        low, high = 80 * (1 + kind), 80 * (1 + kind) + rng.uniform(50, 400)
        heard[i] = signal.chirp(seconds, low, 1.0, high) * np.hanning(LENGTH)
    return heard, species


class Strait(Dataset):
    def __init__(self, heard, species, seed=0):
        self.heard, self.species = heard, species
        self.rng = np.random.default_rng(seed)
        self.fading = np.exp(-np.linspace(0, 6, ECHO))

    def __len__(self):
        return len(self.species)

    def echoes(self):
        response = self.rng.standard_normal(ECHO) * self.fading * self.rng.uniform(0.02, 0.1)
        response[0] = 1.0
        return response

    def __getitem__(self, i):
        wet = np.convolve(self.heard[i], self.echoes())[:LENGTH]
        wet /= np.abs(wet).max()
        return torch.from_numpy(wet.astype(np.float32))[None], self.species[i]


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.ear = nn.Conv1d(1, 32, 64, stride=8)
        self.brain = nn.Conv1d(32, 48, 8, stride=4)
        self.name = nn.Linear(48, SPECIES)

    def forward(self, wave):
        inner = torch.relu(self.brain(torch.relu(self.ear(wave))))
        return self.name(inner.mean(dim=2))


def fit(model, loader, epochs, rate):
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    objective = nn.CrossEntropyLoss(label_smoothing=0.05)
    for _ in range(epochs):
        for wave, kind in loader:
            optimizer.zero_grad()
            objective(model(wave), kind).backward()
            optimizer.step()
    return model


strait = Strait(*calls(320))

# %% the training cell
loader = DataLoader(strait, batch_size=16, shuffle=True, drop_last=True)
listener = fit(Listener(), loader, epochs=12, rate=2e-3)
