# /// cell
# causes = ["worker_restart"]
# because = "an epoch of 8 steps of a few milliseconds, and each has a new loader with two new processes"
# framework = "lightning"
# batch = 50
# steps = 64
# warmup = 8
# profiled = 96
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = "reload_dataloaders_every_n_epochs=1"
# new = "reload_dataloaders_every_n_epochs=0"
# ///
"""Churn from tables in Lightning: a setting left from an older sampler builds the loader anew for each short epoch."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

pl.seed_everything(8, verbose=False)
CATEGORIES = (12, 40, 7, 90)


class Customers(Dataset):
    def __init__(self, count=400):
        g = torch.Generator().manual_seed(8)
        self.figures = torch.randn(count, 30, generator=g)
        self.kinds = torch.stack([torch.randint(c, (count,), generator=g) for c in CATEGORIES], dim=1)
        self.left = (self.figures[:, :3].sum(1) + 0.1 * self.kinds[:, 0] > 0.6).float()

    def __len__(self):
        return len(self.left)

    def __getitem__(self, row):
        return {"figures": self.figures[row], "kinds": self.kinds[row], "left": self.left[row]}


class ChurnData(pl.LightningDataModule):
    def __init__(self, batch_size=50):
        super().__init__()
        self.batch_size, self.customers = batch_size, Customers()

    def train_dataloader(self):
        return DataLoader(
            self.customers, batch_size=self.batch_size, shuffle=True, num_workers=2, persistent_workers=True
        )


class ChurnModel(pl.LightningModule):
    def __init__(self, width=256, dropout=0.1):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(c, 16) for c in CATEGORIES])
        self.mlp = nn.Sequential(
            nn.Linear(30 + 16 * len(CATEGORIES), width), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 1),
        )  # fmt: skip
        self.loss = nn.BCEWithLogitsLoss()

    def forward(self, figures, kinds):
        known = [table(kinds[:, i]) for i, table in enumerate(self.tables)]
        return self.mlp(torch.cat([figures, *known], dim=1)).squeeze(1)

    def training_step(self, batch, batch_idx):
        return self.loss(self(batch["figures"], batch["kinds"]), batch["left"])

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.02, fused=True)


# %% the training cell
trainer = pl.Trainer(
    max_epochs=60,
    reload_dataloaders_every_n_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(ChurnModel(), datamodule=ChurnData())
