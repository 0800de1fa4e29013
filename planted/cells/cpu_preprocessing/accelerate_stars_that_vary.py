# /// cell
# causes = ["cpu_preprocessing"]
# because = "the same periodogram of a star is calculated anew in each epoch"
# framework = "accelerate"
# batch = 24
# steps = 32
# cohort = "2026-11-22b"
#
# [[cure]]
# old = '''
#         self.angular = 2 * np.pi * np.linspace(0.05, 2.5, survey.frequencies)
# '''
# new = '''
#         self.angular = 2 * np.pi * np.linspace(0.05, 2.5, survey.frequencies)
#         self.powers = [self.power(star) for star in range(len(self.kinds))]
# '''
#
# [[cure]]
# old = "return self.power(star), int"
# new = "return self.powers[star], int"
# ///
"""Variable stars told apart with Accelerate, by the periodograms of what was seen of them between clouds."""

from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from scipy.signal import lombscargle
from torch import nn
from torch.utils.data import DataLoader, Dataset

set_seed(12)
KINDS = ("pulsating", "eclipsing", "sawtooth")


@dataclass(frozen=True)
class Survey:
    stars: int = 384
    visits: int = 120
    days: float = 60.0
    frequencies: int = 200
    batch: int = 24
    epochs: int = 15


def observe(survey):
    rng = np.random.default_rng(12)
    nights = np.sort(rng.uniform(0, survey.days, (survey.stars, survey.visits)), axis=1)
    kinds = rng.integers(0, len(KINDS), survey.stars)
    turns = (nights / rng.uniform(0.8, 9, (survey.stars, 1)) + rng.random((survey.stars, 1))) % 1
    curves = np.stack([np.sin(2 * np.pi * turns), np.where(turns < 0.12, -2.0, 0.3), 2 * turns - 1])
    magnitudes = curves[kinds, np.arange(survey.stars)] + rng.normal(0, 0.3, nights.shape)
    return nights, magnitudes, kinds


class LightCurves(Dataset):
    def __init__(self, survey):
        self.nights, self.magnitudes, self.kinds = observe(survey)
        self.angular = 2 * np.pi * np.linspace(0.05, 2.5, survey.frequencies)

    def __len__(self):
        return len(self.kinds)

    def power(self, star):
        seen = self.magnitudes[star] - self.magnitudes[star].mean()
        power = lombscargle(self.nights[star], seen, self.angular, normalize=True)
        return torch.from_numpy(power.astype(np.float32))[None]

    def __getitem__(self, star):
        return self.power(star), int(self.kinds[star])


def classifier(width=24):
    return nn.Sequential(
        nn.Conv1d(1, width, 9, padding=4), nn.GELU(), nn.MaxPool1d(2),
        nn.Conv1d(width, 2 * width, 9, padding=4), nn.GELU(), nn.AdaptiveMaxPool1d(8),
        nn.Flatten(), nn.Linear(16 * width, len(KINDS)),
    )  # fmt: skip


survey = Survey()
curves = LightCurves(survey)

# %% the training cell
accelerator = Accelerator(cpu=True)
model = classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
loader = DataLoader(curves, batch_size=survey.batch, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
for epoch in range(survey.epochs):
    for power, kind in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(power), kind)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch} ends at {loss.item():.3f}")
