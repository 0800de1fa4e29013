# /// cell
# causes = ["storage_bound"]
# because = "each of 8 files waits 5 ms for the disk, one after the other"
# also = ["data_starved"]
# framework = "lightning"
# batch = 8
# steps = 24
# warmup = 12
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "num_workers=0"
# new = "num_workers=4, persistent_workers=True"
# ///
"""Spectrograms, one file each, on a slow disk; Lightning trains."""

import time
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

root = Path("spectrograms")
root.mkdir(exist_ok=True)
for i in range(640):
    np.save(root / f"{i}.npy", np.random.default_rng(i).standard_normal((32, 64)).astype(np.float32))


class Spectrograms(Dataset):
    def __init__(self, root):
        self.paths = sorted(root.iterdir())

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        with open(self.paths[i], "rb") as file:
            time.sleep(0.005)  # stands for the seek of a busy disk
            return np.load(file), i % 5


class Recogniser(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(32, 64, 5, padding=2), nn.ReLU(), nn.Conv1d(64, 64, 5, padding=2), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 5),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2, foreach=True)


# %% the training cell
train = DataLoader(Spectrograms(root), batch_size=8, shuffle=True, num_workers=0)
trainer = pl.Trainer(
    max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(Recogniser(), train)
