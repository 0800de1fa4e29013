# /// cell
# causes = []
# because = "a step is convolutions, and the pictures lie in memory"
# framework = "lightning"
# batch = 16
# steps = 20
# warmup = 4
# tries = { workers = "2", batch_size = "32" }
# cohort = "2026-11-22c"
# ///
"""Ice or sea: a small U-Net in Lightning draws the front of a glacier in radar pictures."""

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(64, verbose=False)


def twice(n_in, n_out):
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(n_out, n_out, 3, padding=1), nn.ReLU(inplace=True),
    )  # fmt: skip


class FrontFinder(L.LightningModule):
    def __init__(self, width=20, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Conv2d(2, width, 4, stride=4)
        self.fine = twice(width, 2 * width)
        self.down = nn.Conv2d(2 * width, 4 * width, 2, stride=2)
        self.coarse = twice(4 * width, 4 * width)
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.merge = twice(4 * width, 2 * width)
        self.draw = nn.ConvTranspose2d(2 * width, 1, 4, stride=4)

    def forward(self, radar):
        fine = self.fine(self.stem(radar))
        coarse = self.up(self.coarse(self.down(fine)))
        return self.draw(self.merge(torch.cat([fine, coarse], 1)))

    def training_step(self, batch, batch_idx):
        radar, ice = batch
        return F.binary_cross_entropy_with_logits(self(radar), ice)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def scenes(count, side=64):
    across = torch.arange(side).view(1, 1, side)
    front = 32 + 12 * torch.sin(torch.linspace(0, 6, side) * torch.rand(count, 1) * 2 + torch.rand(count, 1) * 6)
    ice = (across < front[:, :, None]).float()[:, None]
    return ice + torch.randn(count, 2, side, side), ice


radar, ice = scenes(1600)
train_set = TensorDataset(radar, ice)

# %% the training cell
trainer = L.Trainer(
    accelerator="cpu",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(FrontFinder(), DataLoader(train_set, batch_size=16, shuffle=True))
