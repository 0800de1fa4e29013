# /// cell
# causes = ["checkpoint_save"]
# because = "10 MB of embeddings are written every second step, of which a step changes a few rows"
# framework = "lightning"
# batch = 512
# warmup = 4
# cohort = "2026-11-21d"
#
# [[cure]]
# old = "every_n_steps=2,"
# new = "every_n_steps=2000,"
# ///
"""Recommendations from large embeddings; since a crash, a callback writes everything every other batch; Lightning."""

import tempfile

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(13)
LISTENERS, SONGS, WIDTH = 30_000, 20_000, 48


class TwoTowers(L.LightningModule):
    """A listener and a song are both points; the other songs of the batch are the wrong answers."""

    def __init__(self):
        super().__init__()
        self.listeners = nn.Embedding(LISTENERS, WIDTH, sparse=True)
        self.songs = nn.Embedding(SONGS, WIDTH, sparse=True)
        self.listener_tower = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 64))
        self.song_tower = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 64))

    def training_step(self, batch, batch_idx):
        listener, song = batch
        u = nn.functional.normalize(self.listener_tower(self.listeners(listener)), dim=-1)
        v = nn.functional.normalize(self.song_tower(self.songs(song)), dim=-1)
        return nn.functional.cross_entropy(u @ v.T / 0.1, torch.arange(len(u)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class CrashInsurance(Callback):
    def __init__(self, every_n_steps, filename):
        self.every_n_steps, self.filename = every_n_steps, filename

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step % self.every_n_steps == 0:
            trainer.save_checkpoint(self.filename)


class Plays(L.LightningDataModule):
    def __init__(self, count=40_000, batch_size=512):
        super().__init__()
        self.batch_size = batch_size
        self.plays = TensorDataset(torch.randint(LISTENERS, (count,)), torch.randint(SONGS, (count,)))

    def train_dataloader(self):
        return DataLoader(self.plays, batch_size=self.batch_size, shuffle=True, drop_last=True)


# %% the training cell
with tempfile.TemporaryDirectory() as folder:
    insurance = CrashInsurance(every_n_steps=2, filename=f"{folder}/resume.ckpt")
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        callbacks=[insurance],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(TwoTowers(), datamodule=Plays())
