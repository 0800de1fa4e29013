# /// cell
# causes = ["slow_collate"]
# because = "49 pixels around each of 144 joints of a batch are set one by one"
# framework = "lightning"
# batch = 16
# steps = 20
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = "collate_fn=draw_targets)"
# new = "collate_fn=draw_targets_vectorised)"
# ///
"""Pose estimation in Lightning: the heat maps of all joints of a batch are drawn while it is put together."""

import math
import random

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

L.seed_everything(17, verbose=False)
JOINTS, IMAGE, MAP, SIGMA, REACH = 9, 64, 32, 1.2, 3


class Skeletons(Dataset):
    """Grey pictures of people, with x and y of each joint in pixels of the heat map."""

    def __init__(self, count):
        self.pictures = torch.rand(count, 1, IMAGE, IMAGE)
        self.joints = [[(random.uniform(0, MAP), random.uniform(0, MAP)) for _ in range(JOINTS)] for _ in range(count)]

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return self.pictures[index], self.joints[index]


def draw_targets(batch):
    pictures, people = zip(*batch, strict=True)
    maps = torch.zeros(len(batch), JOINTS, MAP, MAP)
    for b, joints in enumerate(people):
        for j, (x, y) in enumerate(joints):
            for row in range(max(0, int(y) - REACH), min(MAP, int(y) + REACH + 1)):
                for column in range(max(0, int(x) - REACH), min(MAP, int(x) + REACH + 1)):
                    squared = (column - x) ** 2 + (row - y) ** 2
                    maps[b, j, row, column] = math.exp(-squared / (2 * SIGMA**2))
    return torch.stack(pictures), maps


def draw_targets_vectorised(batch):
    pictures, people = zip(*batch, strict=True)
    x, y = torch.tensor(people)[..., None].unbind(2)
    along = torch.arange(MAP)
    wide = torch.exp(-((along - x) ** 2) / (2 * SIGMA**2))
    high = torch.exp(-((along - y) ** 2) / (2 * SIGMA**2))
    return torch.stack(pictures), high[..., :, None] * wide[..., None, :]


class PoseNet(L.LightningModule):
    def __init__(self, width=16, learning_rate=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 7, stride=2, padding=3), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.deconv = nn.ConvTranspose2d(2 * width, JOINTS, 4, stride=2, padding=1)

    def forward(self, pictures):
        return self.deconv(self.backbone(pictures))

    def training_step(self, batch, batch_idx):
        pictures, maps = batch
        loss = nn.functional.mse_loss(self(pictures), maps)
        self.log("mse", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, fused=True)


class PoseData(L.LightningDataModule):
    def setup(self, stage):
        self.people = Skeletons(320)

    def train_dataloader(self):
        return DataLoader(self.people, batch_size=16, shuffle=True, collate_fn=draw_targets)


# %% the training cell
pose = PoseNet()
trainer = L.Trainer(
    max_epochs=10,
    accelerator="cpu",
    gradient_clip_val=0.5,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(pose, datamodule=PoseData())
