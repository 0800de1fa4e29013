# /// cell
# cohort = "third"
# because = "The neighbour list of each small molecule is built with a linked-cell (voxel) search in Python, which only pays for many thousands of atoms; for molecules of 20 atoms take all pair distances at once and compare them with the cutoff."
# thread = "https://github.com/Exscientia/physicsml/issues/21"
# line = "edges.append(voxel_neighbours(xyz, CUTOFF) + 20 * i)"
# callee = "voxel_neighbours"
# faster = 2.75
# ///
from collections import defaultdict
from itertools import product

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
ATOMS, CUTOFF = 20, 3.0
positions = torch.randn(400, ATOMS, 3) * 2.0
kinds = torch.randint(4, (400, ATOMS))
charge = torch.tensor([0.4, -0.6, 0.2, 0.9])
gaps = torch.cdist(positions, positions) + torch.eye(ATOMS) * 1e6
energies = (charge[kinds][:, :, None] * charge[kinds][:, None, :] * torch.exp(-gaps)).sum((1, 2))[:, None]


def voxel_neighbours(xyz, cutoff):
    cells = defaultdict(list)
    index = torch.floor((xyz - xyz.min(0).values) / cutoff).long().tolist()
    for atom, cell in enumerate(index):
        cells[tuple(cell)].append(atom)
    senders, receivers = [], []
    for cell, atoms in cells.items():
        around = []
        for shift in product((-1, 0, 1), repeat=3):
            around += cells.get(tuple(c + s for c, s in zip(cell, shift)), [])
        for i in atoms:
            near = torch.linalg.norm(xyz[around] - xyz[i], dim=1) < cutoff
            for j, close in zip(around, near.tolist()):
                if close and j != i:
                    senders.append(j)
                    receivers.append(i)
    return torch.tensor([senders, receivers])


class EnergyNet(nn.Module):
    def __init__(self, d=96):
        super().__init__()
        self.kind = nn.Embedding(4, d)
        self.centres = nn.Parameter(torch.linspace(0, CUTOFF, 32), requires_grad=False)
        self.filters = nn.ModuleList(nn.Sequential(nn.Linear(32, d), nn.SiLU(), nn.Linear(d, d)) for _ in range(3))
        self.updates = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d)) for _ in range(3))
        self.out = nn.Sequential(nn.Linear(d, 48), nn.SiLU(), nn.Linear(48, 1))

    def forward(self, kinds, xyz, edges):
        h = self.kind(kinds.flatten())
        flat = xyz.reshape(-1, 3)
        r = torch.linalg.norm(flat[edges[0]] - flat[edges[1]], dim=1)
        basis = torch.exp(-10 * (r[:, None] - self.centres) ** 2)
        for weigh, update in zip(self.filters, self.updates):
            message = h[edges[0]] * weigh(basis)
            h = h + update(torch.zeros_like(h).index_add(0, edges[1], message))
        return self.out(h).view(len(xyz), -1).sum(1, keepdim=True)


model = EnergyNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

# %% the training cell
for step in range(100):
    rows = torch.randint(len(positions), (32,))
    batch = positions[rows]
    edges = []
    for i, xyz in enumerate(batch):
        edges.append(voxel_neighbours(xyz, CUTOFF) + 20 * i)
    edges = torch.cat(edges, 1)
    loss = F.mse_loss(model(kinds[rows], batch, edges), energies[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print("last", loss.item())
