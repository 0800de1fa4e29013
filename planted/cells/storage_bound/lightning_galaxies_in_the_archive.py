# /// cell
# causes = ["storage_bound"]
# because = "each cutout is waited for 4 ms in the process that trains"
# framework = "lightning"
# batch = 16
# cohort = "2026-11-22b"
#
# [[cure]]
# old = "num_workers=0"
# new = "num_workers=4, persistent_workers=True"
# ///
"""Galaxies sorted by shape in Lightning, from cutouts in five bands that an observatory's archive holds."""

import tempfile
import time
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

L.seed_everything(3, verbose=False)
BANDS, SIDE, SHAPES = 5, 32, 4
SEEK_S = 0.004


def expose(folder, count):
    """A file for each galaxy; returns what shape each has."""
    sky = np.random.default_rng(3)
    shapes = sky.integers(0, SHAPES, count)
    across = np.linspace(-1, 1, SIDE)
    for number, shape in enumerate(shapes):
        radius = np.hypot(across[:, None] * (1 + shape), across[None, :])
        light = np.exp(-3 * radius) + 0.1 * sky.standard_normal((BANDS, SIDE, SIDE))
        np.save(folder / f"{number:05d}.npy", light.astype(np.float32))
    return shapes


class Cutouts(Dataset):
    def __init__(self, folder, shapes):
        self.folder = folder
        self.shapes = shapes

    def __len__(self):
        return len(self.shapes)

    def __getitem__(self, number):
        time.sleep(SEEK_S)
        light = np.load(self.folder / f"{number:05d}.npy")
        return torch.from_numpy(np.arcsinh(light)), int(self.shapes[number])


class Morphology(L.LightningModule):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(BANDS, width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(2 * width, SHAPES),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        light, shape = batch
        return nn.functional.cross_entropy(self.net(light), shape)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


archive = Path(tempfile.mkdtemp())
galaxies = Cutouts(archive, expose(archive, 640))

# %% the training cell
nights = DataLoader(galaxies, batch_size=16, shuffle=True, num_workers=0)
trainer = L.Trainer(
    max_epochs=6,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Morphology(), nights)
