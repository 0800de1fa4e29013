# /// cell
# causes = []
# because = "convolutions take the step; a line in a CSV every 20 steps and one validation an epoch cost little"
# framework = "lightning"
# batch = 64
# steps = 10
# warmup = 2
# tries = { workers = "2", batch_size = "128" }
# cohort = "2026-11-23"
# ///
import lightning as L
import torch
import torch.nn as nn
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

# Which grape? 9 varieties, hyperspectral pixels (204 bands), 2nd derivative as a second channel.
# Based on the Lightning template of our institute (datamodule + module + logger).


class GrapeData(L.LightningDataModule):
    def __init__(self, n=5760, batch_size=64):
        super().__init__()
        self.n, self.batch_size = n, batch_size

    def setup(self, stage=None):
        g = torch.Generator().manual_seed(9)
        variety = torch.randint(0, 9, (self.n,), generator=g)
        band = torch.arange(204)
        bump = torch.exp(-(((band - 20 * variety[:, None] - 15) / 12.0) ** 2))
        x = (0.5 + 0.2 * bump + 0.05 * torch.randn(self.n, 204, generator=g)).cumsum(1)
        d2 = torch.zeros_like(x)
        d2[:, 1:-1] = x[:, 2:] - 2 * x[:, 1:-1] + x[:, :-2]
        data = TensorDataset(torch.stack([x / 100, d2], 1), variety)
        self.fit_part, self.held_out = torch.utils.data.random_split(data, [self.n - 192, 192], g)

    def train_dataloader(self):
        return DataLoader(self.fit_part, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.held_out, 192)


class GrapeNet(L.LightningModule):
    def __init__(self, width=96):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(2, width, 9, padding=4), nn.ReLU(), nn.Conv1d(width, width, 9, stride=2, padding=4), nn.ReLU(),
            nn.Conv1d(width, width, 9, stride=2, padding=4), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
            nn.Linear(width, 9),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        x, variety = batch
        loss = nn.functional.cross_entropy(self.layers(x), variety)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, variety = batch
        self.log("val_acc", (self.layers(x).argmax(1) == variety).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


L.seed_everything(9, verbose=False)
grapes = GrapeData()

# %% the training cell
trainer = L.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=CSVLogger("logs", name="grapes"),
    log_every_n_steps=20,
    num_sanity_val_steps=0,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(GrapeNet(), datamodule=grapes)
