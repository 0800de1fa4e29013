# /// cell
# causes = ["data_starved"]
# because = "one worker reads 16 frames of 4 ms each while a step takes a few milliseconds"
# also = ["storage_bound"]
# framework = "lightning"
# batch = 16
# steps = 24
# warmup = 16
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = "num_workers=1"
# new = "num_workers=6"
# ///
"""One worker for a dataset that would need four; Lightning trains."""

import time

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Frames(Dataset):
    def __init__(self, count):
        self.frames = torch.randn(count, 3, 16, 16)

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, i):
        time.sleep(0.004)  # stands for a seek in the video on the file server
        return self.frames[i], int(i % 4)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 4))

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


# %% the training cell
loader = DataLoader(Frames(800), batch_size=16, shuffle=True, num_workers=1, persistent_workers=True)
trainer = pl.Trainer(
    max_steps=400,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), loader)
