# /// cell
# causes = ["slow_collate"]
# because = "the adjacency matrix of a batch is written entry by entry"
# batch = 24
# steps = 40
# warmup = 12
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "collate_fn=one_graph)"
# new = "collate_fn=one_graph_at_once)"
# ///
"""Molecules as graphs: the collate function builds one large adjacency matrix entry by entry."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

random.seed(3)


def molecule():
    atoms = random.randint(8, 14)
    bonds = [(random.randrange(atoms), random.randrange(atoms)) for _ in range(2 * atoms)]
    return {"atoms": torch.randn(atoms, 16), "bonds": bonds, "energy": random.random()}


MOLECULES = [molecule() for _ in range(1560)]


class Molecules(Dataset):
    def __len__(self):
        return len(MOLECULES)

    def __getitem__(self, i):
        return MOLECULES[i]


def one_graph(molecules):
    atoms = torch.cat([m["atoms"] for m in molecules])
    adjacency = torch.zeros(len(atoms), len(atoms))
    first = 0
    for m in molecules:
        for a, b in m["bonds"]:
            adjacency[first + a, first + b] = 1.0
            adjacency[first + b, first + a] = 1.0
        first += len(m["atoms"])
    return atoms, adjacency, torch.tensor([m["energy"] for m in molecules])


def one_graph_at_once(molecules):
    atoms = torch.cat([m["atoms"] for m in molecules])
    adjacency = torch.zeros(len(atoms), len(atoms))
    rows, columns, first = [], [], 0
    for m in molecules:
        rows += [first + a for a, _ in m["bonds"]]
        columns += [first + b for _, b in m["bonds"]]
        first += len(m["atoms"])
    adjacency[rows, columns] = 1.0
    adjacency[columns, rows] = 1.0
    return atoms, adjacency, torch.tensor([m["energy"] for m in molecules])


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, atoms, adjacency):
        h = torch.relu(self.first(adjacency @ atoms))
        h = torch.relu(self.second(adjacency @ h))
        return self.out(h).mean()


net = GraphNet()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)

# %% the training cell
for epoch in range(5):
    for atoms, adjacency, energy in DataLoader(Molecules(), batch_size=24, shuffle=True, collate_fn=one_graph):
        optimizer.zero_grad()
        loss = (net(atoms, adjacency) - energy.mean()) ** 2
        loss.backward()
        optimizer.step()
