# /// cell
# because = "each row of each batch is validated in Python"
# callee = "check_rows"
# own = "row_checks"
# ///
"""Insurance claims, whose rows are checked after the loader."""

import torch
from row_checks import check_rows
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(13)
claims = TensorDataset(torch.rand(16_000, 60), torch.rand(16_000, 1))
net = nn.Sequential(nn.Linear(60, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(net.parameters())
# %% the training cell
loader = DataLoader(claims, batch_size=100, shuffle=True)
for epoch in range(3):
    for x, y in loader:
        check_rows(x.tolist())  # HOT
        loss = nn.functional.l1_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
