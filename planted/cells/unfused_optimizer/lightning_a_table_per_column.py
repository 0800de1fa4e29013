# /// cell
# causes = ["unfused_optimizer"]
# because = "144 small tensors, for each of which Adam calls a dozen operations"
# framework = "lightning"
# batch = 128
# steps = 40
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "torch.optim.Adam(self.parameters(), lr=2e-3)"
# new = "torch.optim.Adam(self.parameters(), lr=2e-3, fused=True)"
# ///
"""Clicks are predicted from 140 categorical columns, each of which has a small embedding of its own; Lightning."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
sizes = [5 + (37 * column) % 90 for column in range(140)]
rows = torch.stack([torch.randint(0, size, (12_800,)) for size in sizes], 1)
clicks = ((rows[:, 0] + rows[:, 7]) % 3 == 0).float()


class ClickModel(pl.LightningModule):
    def __init__(self, sizes, dim=8):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, dim) for size in sizes)
        self.register_buffer("starts", torch.tensor([0, *sizes[:-1]]).cumsum(0))
        self.tower = nn.Sequential(nn.Linear(dim * len(sizes), 64), nn.ReLU(), nn.Linear(64, 1))
        self.loss = nn.BCEWithLogitsLoss()

    def forward(self, columns):
        # one look-up in all tables at once instead of 140
        weights = torch.cat([table.weight for table in self.tables])
        embedded = nn.functional.embedding(columns + self.starts, weights)
        return self.tower(embedded.flatten(1)).squeeze(1)

    def training_step(self, batch, batch_idx):
        columns, clicked = batch
        return self.loss(self(columns), clicked)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=600)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# %% the training cell
loader = DataLoader(TensorDataset(rows, clicks), batch_size=128, shuffle=True, drop_last=True)
trainer = pl.Trainer(
    max_epochs=3,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(ClickModel(sizes), loader)
