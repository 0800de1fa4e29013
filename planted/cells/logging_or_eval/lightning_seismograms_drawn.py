# /// cell
# causes = ["logging_or_eval"]
# because = "a figure is drawn and written as a picture after each step"
# framework = "lightning"
# needs = ["matplotlib"]
# batch = 128
# steps = 24
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = "Gallery(waves[:2])"
# new = "Gallery(waves[:2], every_n_batches=1000)"
# ///
"""A variational autoencoder of seismograms, which draws what it has reconstructed after each batch; Lightning."""

import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(4)
PICTURES = Path(tempfile.mkdtemp())
LENGTH = 512


def seismograms(count):
    t = torch.linspace(0, 1, LENGTH)
    onset = 0.2 + 0.5 * torch.rand(count, 1)
    after = (t - onset).clamp(min=0)
    waves = torch.exp(-6 * after) * torch.sin(90 * (1 + torch.rand(count, 1)) * after)
    return waves + 0.05 * torch.randn(count, LENGTH)


class WaveVAE(pl.LightningModule):
    def __init__(self, latent=16, beta=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(LENGTH, 384), nn.SiLU(), nn.Linear(384, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 384), nn.SiLU(), nn.Linear(384, LENGTH))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(z), mean, log_variance

    def training_step(self, batch, batch_idx):
        (x,) = batch
        x_hat, mean, log_variance = self(x)
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean()
        return nn.functional.mse_loss(x_hat, x, reduction="none").sum(-1).mean() + self.hparams.beta * kl

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


class Gallery(pl.Callback):
    """Two seismograms and their reconstructions, as pictures."""

    def __init__(self, waves, every_n_batches=1):
        self.waves, self.every_n_batches = waves, every_n_batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step % self.every_n_batches:
            return
        with torch.no_grad():
            redrawn = pl_module(self.waves)[0]
        figure = Figure(figsize=(4, 2))
        for axes, wave, line in zip(figure.subplots(2, 1, sharex=True), self.waves, redrawn, strict=True):
            axes.plot(wave, lw=0.5, color="grey")
            axes.plot(line, lw=0.8)
        figure.suptitle(f"batch {trainer.global_step}")
        figure.savefig(PICTURES / f"{trainer.global_step % 50:03}.png", dpi=60)


# %% the training cell
waves = seismograms(4096)
loader = DataLoader(TensorDataset(waves), batch_size=128, shuffle=True)
trainer = pl.Trainer(
    max_epochs=6,
    accelerator="cpu",
    callbacks=[Gallery(waves[:2])],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(WaveVAE(), loader)
