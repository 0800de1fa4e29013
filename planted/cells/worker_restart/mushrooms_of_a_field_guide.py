# /// cell
# causes = ["worker_restart"]
# because = "both workers are started anew for each epoch of six steps"
# batch = 16
# steps = 42
# warmup = 6
# cohort = "2026-11-22c"
#
# [[cure]]
# old = "num_workers=2"
# new = "num_workers=2, persistent_workers=True"
# ///
"""Mushrooms told apart from six plates of a field guide each, which are cropped and tinted at random each time."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class FieldGuide(Dataset):
    def __init__(self, species=16, plates=6, side=48, crop=40, seed=3):
        rng = np.random.default_rng(seed)
        caps = rng.random((species, 1, 3, 6, 6)).repeat(8, axis=3).repeat(8, axis=4)[..., :side, :side]
        self.plates = (0.7 * caps + 0.3 * rng.random((species, plates, 3, side, side))).astype(np.float32)
        self.crop, self.slack = crop, side - crop

    def __len__(self):
        return self.plates.shape[0] * self.plates.shape[1]

    def __getitem__(self, i):
        species, plate = divmod(i, self.plates.shape[1])
        picture = torch.from_numpy(self.plates[species, plate])
        top, left = torch.randint(0, self.slack + 1, (2,)).tolist()
        picture = picture[:, top : top + self.crop, left : left + self.crop]
        if torch.rand(()) < 0.5:
            picture = picture.flip(2)
        return picture * (0.8 + 0.4 * torch.rand(3, 1, 1)), species


class Embedder(nn.Module):
    def __init__(self, species, width=32, dim=64):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(2 * width, dim, 3, stride=2, padding=1)
        self.prototypes = nn.Parameter(torch.randn(species, dim))

    def forward(self, x):
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.relu(conv(x))
        return 10 * F.normalize(x.mean((2, 3)), dim=1) @ F.normalize(self.prototypes, dim=1).T


def forever(loader):
    while True:
        yield from loader


torch.manual_seed(3)
guide = FieldGuide()
embedder = Embedder(species=16)
sgd = torch.optim.SGD(embedder.parameters(), lr=0.05, momentum=0.9)
decay = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=240)

# %% the training cell
batches = forever(DataLoader(guide, batch_size=16, shuffle=True, num_workers=2))
for step in range(240):
    pictures, species = next(batches)
    loss = F.cross_entropy(embedder(pictures), species, label_smoothing=0.05)
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    decay.step()
    if step % 60 == 59:
        print(f"step {step + 1}: {loss.item():.3f}")
