# /// cell
# causes = ["storage_bound"]
# because = "each of 32 users waits 1.5 ms for the feature store, one after the other"
# also = ["data_starved"]
# batch = 32
# steps = 24
# warmup = 8
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "def get_many(self, users)"
# new = "def __getitems__(self, users)"
# ///
"""A two-tower recommender whose user histories come from a feature store, one request for each user of the batch."""

import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(1)
USERS, ITEMS, HISTORY = 3200, 2000, 20


class FeatureStore:
    """Client of the key-value store that the features live in."""

    def __init__(self):
        rng = np.random.default_rng(1)
        self._histories = rng.integers(0, ITEMS, (USERS, HISTORY + 1))

    def mget(self, keys):
        time.sleep(0.0015)  # there and back
        return self._histories[keys]


class Interactions(Dataset):
    def __init__(self, store):
        self.store = store

    def __len__(self):
        return USERS

    def __getitem__(self, user):
        (row,) = self.store.mget([user])
        return row[:-1], row[-1]

    def get_many(self, users):
        return [(row[:-1], row[-1]) for row in self.store.mget(users)]


class TwoTower(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.seen = nn.EmbeddingBag(ITEMS, dim, mode="mean")
        self.item = nn.Embedding(ITEMS, dim)
        self.user_mlp = nn.Sequential(
            nn.Linear(dim, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, dim)
        )
        self.item_mlp = nn.Sequential(
            nn.Linear(dim, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, dim)
        )

    def forward(self, history, item):
        u = F.normalize(self.user_mlp(self.seen(history)), dim=-1)
        v = F.normalize(self.item_mlp(self.item(item)), dim=-1)
        return u @ v.T / 0.07


model = TwoTower()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

# %% the training cell
train_loader = DataLoader(Interactions(FeatureStore()), batch_size=32, shuffle=True, drop_last=True)


def train_epoch():
    model.train()
    running = 0.0
    for history, positive in train_loader:
        logits = model(history, positive)
        loss = F.cross_entropy(logits, torch.arange(len(logits)))  # the others of the batch are the negatives
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        running = running + loss.detach()
    return running / len(train_loader)


for epoch in range(2):
    print(epoch, train_epoch())
