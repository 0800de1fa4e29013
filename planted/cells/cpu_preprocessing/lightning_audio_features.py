# /// cell
# causes = ["cpu_preprocessing"]
# because = "a Fourier transform of each recording each time it is asked for"
# also = ["data_starved"]
# framework = "lightning"
# batch = 8
# warmup = 12
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "dataset = Recordings()"
# new = "dataset = prepared()"
# ///
"""Mel-like features are computed from each recording when it is asked for; Lightning trains an LSTM."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

WINDOW = torch.hann_window(400)
recordings = torch.randn(512, 16_000) * 0.1
bands = torch.rand(201, 24)


def features(wave):
    wave = torch.cat([wave[:1], wave[1:] - 0.97 * wave[:-1]])
    power = torch.stft(wave, 400, hop_length=160, window=WINDOW, return_complex=True).abs() ** 2
    return torch.log(bands.T @ power + 1e-6).T[::4]


class Recordings(Dataset):
    def __len__(self):
        return len(recordings)

    def __getitem__(self, i):
        return features(recordings[i]), i % 3


class Speaker(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.lstm = nn.GRU(24, 32, batch_first=True)
        self.head = nn.Linear(32, 3)

    def training_step(self, batch, _):
        _, hidden = self.lstm(batch[0])
        return nn.functional.cross_entropy(self.head(hidden[-1]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer():
    return pl.Trainer(
        max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


def prepared():
    """All features once."""
    return TensorDataset(torch.stack([features(w) for w in recordings]), torch.arange(len(recordings)) % 3)


# %% the training cell
dataset = Recordings()
loader = DataLoader(dataset, batch_size=8, shuffle=True)
trainer().fit(Speaker(), loader)
