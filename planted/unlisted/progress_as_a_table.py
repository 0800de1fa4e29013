# /// cell
# because = "rich lays a table of all losses out in each step"
# callee = "rich"
# ///
"""Bridges that need repair; the last losses are drawn as a table of text after every second step."""

import io

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(10)
bridges = TensorDataset(torch.randn(12_800, 100), torch.rand(12_800, 1))
net = nn.Sequential(nn.Linear(100, 600), nn.Tanh(), nn.Linear(600, 400), nn.Tanh(), nn.Linear(400, 1))
optimizer = torch.optim.Adam(net.parameters())
console = Console(file=io.StringIO(), width=100)
losses = []
# %% the training cell
loader = DataLoader(bridges, batch_size=128, shuffle=True)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if i % 2:
            table = Table("step", "loss", "mean")
            for j, value in enumerate(losses[-24:]):
                table.add_row(str(j), f"{value:.4f}", f"{sum(losses) / len(losses):.4f}")
            console.print(table)  # HOT
