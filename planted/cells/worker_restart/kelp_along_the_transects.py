# /// cell
# causes = ["worker_restart"]
# because = "both workers are started anew for each epoch of eight steps"
# batch = 16
# steps = 40
# warmup = 8
# profiled = 64
# cohort = "2026-11-22b"
#
# [[cure]]
# old = "num_workers=2"
# new = "num_workers=2, persistent_workers=True"
# ///
"""How much of a quadrat is kelp: 128 photographs from a dive, gone through often with random cuts and turns."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(55)


class Quadrats(Dataset):
    """Photographs of 56 by 56 pixels, each with the share that a diver wrote down."""

    def __init__(self, count, cut=48):
        rng = np.random.default_rng(55)
        self.shares = rng.random(count).astype(np.float32)
        leaves = rng.random((count, 1, 56, 56)) < self.shares[:, None, None, None]
        self.photographs = (leaves * 0.6 + rng.random((count, 3, 56, 56)) * 0.4).astype(np.float32)
        self.cut = cut

    def __len__(self):
        return len(self.shares)

    def __getitem__(self, which):
        top, left, turns = torch.randint(0, 8, (3,)).tolist()
        seen = self.photographs[which, :, top : top + self.cut, left : left + self.cut]
        return torch.from_numpy(np.rot90(seen, turns, (1, 2)).copy()), self.shares[which]


class Estimator(nn.Module):
    def __init__(self):
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()
        )  # fmt: skip
        self.guess = nn.Linear(32, 1)

    def forward(self, photograph):
        return self.guess(self.look(photograph).mean((2, 3))).squeeze(1).sigmoid()


class Dive:
    """Trains for as many epochs as it takes, at most `most`."""

    def __init__(self, model, loader, most=40, good_enough=1e-6):
        self.model, self.loader = model, loader
        self.most, self.good_enough = most, good_enough
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.losses = []

    def epoch(self):
        total = 0.0
        for photograph, share in self.loader:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(photograph), share)
            loss.backward()
            self.optimizer.step()
            total = total + loss.detach()
        return float(total) / len(self.loader)

    def run(self):
        while len(self.losses) < self.most:
            self.losses.append(self.epoch())
            if self.losses[-1] < self.good_enough:
                break
        return self.losses


quadrats = Quadrats(128)

# %% the training cell
loader = DataLoader(quadrats, batch_size=16, shuffle=True, num_workers=2)
dive = Dive(Estimator(), loader)
losses = dive.run()
