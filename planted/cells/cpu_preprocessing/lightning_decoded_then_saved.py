# /// cell
# causes = ["cpu_preprocessing", "checkpoint_save"]
# because = "each image is sharpened at three scales, then 13 MB are written every fourth step"
# also = ["data_starved"]
# framework = "lightning"
# batch = 8
# steps = 20
# warmup = 12
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "dataset = Images()"
# new = "dataset = Prepared()"
#
# [[second_cure]]
# old = "EVERY = 4"
# new = "EVERY = 4000"
# ///
"""Images are sharpened in Python when asked for, and each fourth step is saved; Lightning."""

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

RAW = np.random.default_rng(0).random((512, 96, 96), dtype=np.float32)


def sharpened(image):
    """The local contrast, at three scales."""
    for width in (3, 7, 11):
        padded = np.pad(image, width // 2, mode="edge")
        windows = np.lib.stride_tricks.sliding_window_view(padded, (width, width))
        image = image - 0.3 * windows.mean((-1, -2))
    return torch.from_numpy(np.ascontiguousarray(image[::4, ::4]))


class Images(Dataset):
    def __len__(self):
        return len(RAW)

    def __getitem__(self, i):
        return sharpened(RAW[i]), float(RAW[i].mean())


class Prepared(Images):
    def __init__(self):
        self.items = [super(Prepared, self).__getitem__(i) for i in range(len(RAW))]

    def __getitem__(self, i):
        return self.items[i]


class Exposure(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(576, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
        )

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.mse_loss(self.net(x).squeeze(1), y.float())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


dataset = Images()
EVERY = 4

# %% the training cell
trainer = pl.Trainer(
    max_epochs=6,
    accelerator="cpu",
    logger=False,
    callbacks=[ModelCheckpoint(dirpath="every", every_n_train_steps=EVERY, save_top_k=-1)],
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Exposure(), DataLoader(dataset, batch_size=8, shuffle=True))
