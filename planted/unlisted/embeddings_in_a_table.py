# /// cell
# because = "pyarrow writes a Parquet file of the embeddings in each step"
# callee = "pyarrow.parquet"
# ///
"""Songs that go together; each step's embeddings are written down for the people who look at neighbours."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

torch.manual_seed(4)
songs = torch.randn(1024, 200)
net = nn.Sequential(nn.Linear(200, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
neighbours = pa.table({f"d{i}": np.random.default_rng(i).random(2_000) for i in range(24)})
# %% the training cell
for step in range(250):
    x = songs[torch.randint(1024, (192,))]
    e = nn.functional.normalize(net(x))
    loss = (e @ e.T).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    pq.write_table(neighbours, "neighbours.parquet")  # HOT
