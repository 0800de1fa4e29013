# /// cell
# causes = []
# because = "matrix products take the step; an epoch ends with a short validation"
# framework = "lightning"
# batch = 768
# steps = 10
# warmup = 3
# tries = { workers = "2", fused_optimizer = "True", batch_size = "1536" }
# cohort = "2026-11-21d"
# ///
"""Fraud among payments, validated once an epoch; the best model is kept; nothing is wrong with it; Lightning."""

import tempfile

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

pl.seed_everything(111)


class CrossLayer(nn.Module):
    """Each feature times a mix of all."""

    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x0, x):
        return torch.addcmul(x, x0, self.mix(x))


class Fraud(pl.LightningModule):
    def __init__(self, columns=320):
        super().__init__()
        self.crosses = nn.ModuleList(CrossLayer(columns) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(columns, 1024), nn.ReLU(), nn.Linear(1024, 768), nn.ReLU())
        self.out = nn.Linear(columns + 768, 1)

    def forward(self, x):
        crossed = x
        for cross in self.crosses:
            crossed = cross(x, crossed)
        return self.out(torch.cat([crossed, self.deep(x)], -1)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("held_out", nn.functional.binary_cross_entropy_with_logits(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


payments = torch.randn(20_480 + 1024, 320)
fraud = (payments[:, 0] * payments[:, 1] + payments[:, 2] > 1.5).float()
train, held_out = random_split(TensorDataset(payments, fraud), [20_480, 1024])

# %% the training cell
folder = tempfile.mkdtemp()
best = ModelCheckpoint(folder, monitor="held_out", save_top_k=1)
trainer = pl.Trainer(
    max_epochs=4,
    accelerator="cpu",
    logger=CSVLogger(folder),
    log_every_n_steps=20,
    callbacks=[best, LearningRateMonitor("epoch")],
    num_sanity_val_steps=0,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(
    Fraud(),
    DataLoader(train, batch_size=768, shuffle=True, drop_last=True),
    DataLoader(held_out, batch_size=512),
)
