"""Each record is fetched from a database and turned into features: half waiting, half computing."""

import json
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

rng = np.random.default_rng(0)
RECORDS = [json.dumps({"t": rng.standard_normal(600).round(4).tolist(), "label": i % 2}) for i in range(1200)]


class Records(Dataset):
    def __len__(self):
        return len(RECORDS)

    def __getitem__(self, i):
        time.sleep(0.0015)  # stands for the query
        record = json.loads(RECORDS[i])
        series = np.array(record["t"])
        features = [float(np.percentile(series[k : k + 60], p)) for k in range(0, 540, 90) for p in (5, 50, 95)]
        return torch.tensor(features), record["label"]


model = nn.Sequential(nn.Linear(18, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
optimizer = torch.optim.Adam(model.parameters(), fused=True)

# %% the training cell
train = DataLoader(Records(), batch_size=16, shuffle=True)
for epoch in range(10):
    for x, y in train:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
