# /// cell
# causes = ["cpu_preprocessing"]
# because = "one worker seeks neighbours and normals of 16 clouds while a step takes a few milliseconds"
# also = ["data_starved"]
# batch = 16
# warmup = 15
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "TwoViews(shapes, prepare=estimate_normals)"
# new = "TwoViews([estimate_normals(s) for s in shapes], prepare=lambda cloud: cloud)"
# ///
"""Contrastive learning on point clouds: the one worker estimates normals for each cloud and the training waits."""

import numpy as np
import torch
import torch.nn.functional as F
from scipy.spatial import cKDTree
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
rng = np.random.default_rng(5)
N_POINTS = 384


def random_shape():
    p = rng.standard_normal((N_POINTS, 3)).astype(np.float32)
    p /= np.linalg.norm(p, axis=1, keepdims=True) ** rng.uniform(0.6, 1.2)
    return p * rng.uniform(0.5, 1.5, 3).astype(np.float32)


def estimate_normals(points, k=16):
    """Of each point the direction in which its neighbours vary least, beside its coordinates."""
    _, near = cKDTree(points).query(points, k=k)
    local = points[near] - points[near].mean(1, keepdims=True)
    _, axes = np.linalg.eigh(np.einsum("nki,nkj->nij", local, local))
    return np.concatenate([points, axes[:, :, 0].astype(np.float32)], axis=1)


def augment(cloud):
    angle = np.random.uniform(0, 2 * np.pi)
    c, s = np.cos(angle), np.sin(angle)
    spin = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]], dtype=np.float32)
    keep = np.random.permutation(len(cloud))[:256]
    return np.concatenate([cloud[keep, :3] @ spin.T, cloud[keep, 3:] @ spin.T], axis=1)


class TwoViews(Dataset):
    def __init__(self, clouds, prepare):
        self.clouds, self.prepare = clouds, prepare

    def __len__(self):
        return len(self.clouds)

    def __getitem__(self, i):
        cloud = self.prepare(self.clouds[i])
        return augment(cloud), augment(cloud)


class PointNet(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.local = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 96), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, dim))

    def forward(self, x):
        return F.normalize(self.head(self.local(x).amax(dim=1)), dim=-1)


def info_nce(a, b, temperature=0.1):
    logits = a @ b.T / temperature
    target = torch.arange(len(a))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


shapes = [random_shape() for _ in range(240)]
encoder = PointNet()
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=300)

# %% the training cell
dataset = TwoViews(shapes, prepare=estimate_normals)
loader = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=1, persistent_workers=True)
for epoch in range(16):
    total = torch.zeros(())
    for first, second in loader:
        loss = info_nce(encoder(first), encoder(second))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.detach()
    print(f"epoch {epoch}: {total / len(loader):.3f}")
