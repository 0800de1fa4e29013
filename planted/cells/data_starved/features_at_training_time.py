# /// cell
# causes = ["data_starved"]
# because = "each of 16 records waits 1.5 ms for the query, and then as long for its features"
# also = ["storage_bound", "cpu_preprocessing"]
# batch = 16
# steps = 24
# warmup = 12
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "shuffle=True)"
# new = "shuffle=True, num_workers=4, persistent_workers=True)"
# ///
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
