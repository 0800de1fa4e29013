# /// cell
# cohort = "fourth"
# because = "The resumable stream asks the state of its nested sources after every single row, and state_dict() makes a copy.deepcopy of the whole nested state; the deep copies cost much more than reading the rows. Cure: copy the plain dicts and lists with a light recursive function instead of deepcopy."
# thread = "https://github.com/huggingface/datasets/issues/8393"
# line = "return copy.deepcopy(self.state)"
# callee = "copy.deepcopy"
# faster = 2.8
# ///
import copy
import json
import os
import random
import tempfile

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset

torch.manual_seed(0)
folder = tempfile.mkdtemp()
n_users, n_items, n_shards, shard_rows = 5000, 3000, 48, 1600


def write_shards():
    rng = np.random.default_rng(2)
    taste = rng.normal(size=(n_users, 4))
    kind = rng.normal(size=(n_items, 4))
    paths = []
    for k in range(n_shards):
        users = rng.integers(0, n_users, shard_rows)
        items = rng.integers(0, n_items, shard_rows)
        score = (taste[users] * kind[items]).sum(1) + rng.normal(0, 0.5, shard_rows)
        paths.append(os.path.join(folder, f"clicks_{k:03d}.jsonl"))
        with open(paths[-1], "w") as f:
            for u, i, s in zip(users, items, score):
                hour = int(rng.integers(24))
                f.write(json.dumps({"user": int(u), "item": int(i), "hour": hour, "click": int(s > 0)}) + "\n")
    return paths


class Source:
    def __init__(self):
        self.state = {}

    def state_dict(self):
        return copy.deepcopy(self.state)


class ShardRows(Source):
    def __init__(self, path):
        super().__init__()
        self.path = path
        self.state = {"path": path, "row": 0, "finished": False}

    def __iter__(self):
        with open(self.path) as f:
            for line in f:
                self.state["row"] += 1
                yield json.loads(line)
        self.state["finished"] = True


class Interleaved(Source):
    def __init__(self, sources):
        super().__init__()
        self.sources = sources
        self.state = {"sources": [s.state_dict() for s in sources], "position": 0, "rows": 0}

    def __iter__(self):
        active = [(k, iter(s)) for k, s in enumerate(self.sources)]
        while active:
            position = self.state["position"] % len(active)
            k, rows = active[position]
            row = next(rows, None)
            self.state["sources"][k] = self.sources[k].state_dict()
            if row is None:
                active.pop(position)
                continue
            self.state["position"] = position + 1
            self.state["rows"] += 1
            yield row


class Shuffled(Source):
    def __init__(self, source, buffer_size, seed):
        super().__init__()
        self.source = source
        self.buffer_size = buffer_size
        self.random = random.Random(seed)
        self.state = {"source": source.state_dict(), "buffered": 0}

    def __iter__(self):
        buffer = []
        for row in self.source:
            self.state["source"] = self.source.state_dict()
            if len(buffer) < self.buffer_size:
                buffer.append(row)
                self.state["buffered"] = len(buffer)
                continue
            k = self.random.randrange(self.buffer_size)
            chosen, buffer[k] = buffer[k], row
            yield chosen
        self.random.shuffle(buffer)
        yield from buffer


class ClickStream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        for row in self.rows:
            yield row["user"], row["item"], row["hour"], float(row["click"])


class ClickModel(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.user = nn.Embedding(n_users, dim)
        self.item = nn.Embedding(n_items, dim)
        self.hour = nn.Embedding(24, dim)
        self.tower = nn.Sequential(nn.Linear(3 * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, user, item, hour):
        u, i, h = self.user(user), self.item(item), self.hour(hour)
        return (u * i).sum(1) + self.tower(torch.cat([u, i, h], dim=1)).squeeze(1)


paths = write_shards()
rows = Shuffled(Interleaved([ShardRows(path) for path in paths]), buffer_size=2000, seed=0)
model = ClickModel()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.BCEWithLogitsLoss()
loader = DataLoader(ClickStream(rows), batch_size=256)

# %% the training cell
for step, (user, item, hour, click) in enumerate(loader):
    loss = criterion(model(user, item, hour), click.float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        seen = rows.state_dict()["source"]["rows"]
        print(f"step {step} rows {seen} loss {loss.item():.4f}")
