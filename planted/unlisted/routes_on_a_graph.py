# /// cell
# because = "networkx walks a graph of roads in each step"
# callee = "networkx"
# ///
"""How long a drive takes; the shortest routes from one crossing are found again in each step."""

import networkx as nx
import torch
from torch import nn

torch.manual_seed(6)
roads = nx.random_geometric_graph(700, 0.1, seed=1)
net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.Adam(net.parameters())
drives, minutes = torch.randn(4096, 64), torch.rand(4096, 1)
reached = []


def train(steps):
    for step in range(steps):
        rows = torch.randint(4096, (160,))
        loss = (net(drives[rows]) - minutes[rows]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        near = nx.single_source_dijkstra_path_length(roads, step % 700)  # HOT
        reached.append(len(near))


# %% the training cell
train(400)
