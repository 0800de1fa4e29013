# /// cell
# because = "__getitem__ runs farthest point sampling, a Python loop of 128 rounds over all points, for the same fixed clouds in every epoch."
# thread = "https://github.com/MegEngine/OMNet/issues/5"
# line = "return torch.from_numpy(farthest_points(self.clouds[i], 128)), int(self.labels[i])"
# callee = "farthest_points"
# faster = 3.8
# ///
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

rng = np.random.default_rng(0)
torch.manual_seed(0)


def farthest_points(xyz, m):
    n = xyz.shape[0]
    chosen = np.zeros(m, dtype=np.int64)
    distance = np.full(n, 1e10, dtype=np.float32)
    farthest = 0
    for i in range(m):
        chosen[i] = farthest
        d = ((xyz - xyz[farthest]) ** 2).sum(-1)
        distance = np.minimum(distance, d)
        farthest = int(distance.argmax())
    return xyz[chosen]


class Clouds(Dataset):
    def __init__(self, n=160):
        self.labels = rng.integers(0, 4, n)
        self.clouds = [(rng.standard_normal((2048, 3)) * np.array([1, 1 + c, 1])).astype(np.float32) for c in self.labels]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return torch.from_numpy(farthest_points(self.clouds[i], 128)), int(self.labels[i])


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.local = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 256))
        self.head = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 4))

    def forward(self, x):
        return self.head(self.local(x).amax(1))


train_set = Clouds()
model = PointNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
# %% the training cell
loader = DataLoader(train_set, batch_size=16, shuffle=True)
for epoch in range(6):
    hits = 0
    for xyz, label in loader:
        logits = model(xyz)
        loss = nn.functional.cross_entropy(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hits += (logits.argmax(1) == label).sum().item()
    print(epoch, hits / len(train_set))
