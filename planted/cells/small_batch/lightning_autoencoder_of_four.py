# /// cell
# causes = ["small_batch"]
# because = "a step for 4 readings costs nearly as much as one for 64"
# framework = "lightning"
# batch = 4
# cured_batch = 64
# steps = 100
# profiled = 100
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "size = 4"
# new = "size = 64"
# ///
"""An autoencoder for sensor readings that sees four readings per step; Lightning."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 24))

    def training_step(self, batch, _):
        (x,) = batch
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2, foreach=True)


readings = TensorDataset(torch.randn(8000, 24))
size = 4

# %% the training cell
trainer = pl.Trainer(
    max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(Autoencoder(), DataLoader(readings, batch_size=size, shuffle=True))
