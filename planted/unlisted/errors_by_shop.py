# /// cell
# because = "a pandas table of all errors is written as CSV in each step"
# callee = "to_csv"
# ///
"""Sales of shops; the errors of each shop are kept in a table that is written anew in each step."""

import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
sales = TensorDataset(torch.randn(16_000, 96), torch.randn(16_000, 1))
net = nn.Sequential(nn.Linear(96, 768), nn.GELU(), nn.Linear(768, 384), nn.GELU(), nn.Linear(384, 1))
optimizer = torch.optim.Adam(net.parameters())
table = pd.DataFrame({"shop": range(1500), "error": 0.1, "share": 0.25})
# %% the training cell
for epoch in range(3):
    for x, y in DataLoader(sales, batch_size=128, shuffle=True, drop_last=True):
        loss = (net(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        table.to_csv("errors.csv")  # HOT
