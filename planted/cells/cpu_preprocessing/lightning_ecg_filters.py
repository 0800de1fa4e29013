# /// cell
# causes = ["cpu_preprocessing"]
# because = "each trace is median-filtered, band-passed and resampled again in each epoch"
# also = ["data_starved"]
# framework = "lightning"
# batch = 16
# steps = 24
# warmup = 12
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "Beats(traces, labels, transform=cleaned)"
# new = "Beats([cleaned(trace) for trace in traces], labels)"
# ///
"""A small ResNet on heart beats, whose traces are cleaned of hum and drift whenever they are read. Lightning."""

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from scipy import signal
from torch import nn
from torch.utils.data import DataLoader, Dataset

pl.seed_everything(7)
RATE = 250  # Hz


def simulate(n, seconds=8):
    rng = np.random.default_rng(11)
    t = np.arange(seconds * RATE) / RATE
    rate = rng.uniform(0.8, 2.0, (n, 1))
    beat = np.exp(-(((t * rate) % 1 - 0.5) ** 2) / 0.001)
    drift = 0.8 * np.sin(2 * np.pi * 0.2 * t + rng.uniform(0, 6, (n, 1)))
    hum = 0.2 * np.sin(2 * np.pi * 50 * t)
    return beat + drift + hum + 0.05 * rng.standard_normal((n, t.size)), (rate[:, 0] > 1.4).astype(np.int64)


def cleaned(trace):
    drift = signal.medfilt(trace, 151)
    b, a = signal.butter(3, (0.5, 40), "bandpass", fs=RATE)
    calm = signal.filtfilt(b, a, trace - drift)
    calm = signal.resample_poly(calm, 1, 4)
    return ((calm - calm.mean()) / calm.std()).astype(np.float32)


class Beats(Dataset):
    def __init__(self, traces, labels, transform=None):
        self.traces, self.labels, self.transform = traces, labels, transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        trace = self.traces[idx]
        if self.transform is not None:
            trace = self.transform(trace)
        return torch.from_numpy(trace).unsqueeze(0), self.labels[idx]


class BeatsData(pl.LightningDataModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        traces, labels = simulate(256)
        self.train = Beats(traces, labels, transform=cleaned)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv1d(width, width, 7, padding=3)
        self.conv2 = nn.Conv1d(width, width, 7, padding=3)

    def forward(self, x):
        return F.relu(x + self.conv2(F.relu(self.conv1(x))))


class Arrhythmia(pl.LightningModule):
    def __init__(self, width=24, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv1d(1, width, 15, stride=2, padding=7), nn.ReLU(), Residual(width), nn.MaxPool1d(2), Residual(width),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, 2),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)]


# %% the training cell
model = Arrhythmia()
trainer = pl.Trainer(
    max_epochs=12,
    accelerator="cpu",
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, datamodule=BeatsData())
