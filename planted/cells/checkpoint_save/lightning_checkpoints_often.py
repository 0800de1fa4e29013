# /// cell
# causes = ["checkpoint_save"]
# because = "14 MB are written every second step, and none is thrown away"
# framework = "lightning"
# batch = 64
# warmup = 4
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = "EVERY = 2"
# new = "EVERY = 2000"
# ///
"""A checkpoint after every second step, to be sure; Lightning."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dataset = TensorDataset(torch.randn(2048, 100), torch.randn(2048, 1))
EVERY = 2


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(100, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))

    def training_step(self, batch, _):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


# %% the training cell
keep = ModelCheckpoint(dirpath="kept", every_n_train_steps=EVERY, save_top_k=-1)
trainer = pl.Trainer(
    max_epochs=20,
    accelerator="cpu",
    logger=False,
    callbacks=[keep],
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Regression(), DataLoader(dataset, batch_size=64, shuffle=True))
