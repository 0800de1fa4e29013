"""Trains a small network with Lightning on pictures that are turned and blurred one by one: the data are slow."""

import lightning as L
import torch
from scipy import ndimage
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self):
        digits = load_digits()
        self.images, self.targets = digits.images, digits.target

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = ndimage.zoom(self.images[index] / 16, 6, order=3)
        image = ndimage.rotate(image, 5 * (index % 7) - 15, reshape=False)
        image = ndimage.gaussian_filter(image, 1.0)
        return torch.tensor(image, dtype=torch.float32)[None], int(self.targets[index])


class Network(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(),
            nn.LazyLinear(10),
        )  # fmt: skip
        self.layers(torch.zeros(1, 1, 48, 48))

    def training_step(self, batch, batch_idx):
        images, targets = batch
        loss = nn.functional.cross_entropy(self.layers(images), targets)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


trainer = L.Trainer(max_steps=400, enable_checkpointing=False, logger=False)
trainer.fit(Network(), DataLoader(Pictures(), batch_size=16, shuffle=True))
