# /// cell
# causes = ["cpu_preprocessing"]
# because = "shortest paths, eigenvectors and random walks of each of 20 molecules, in each epoch"
# also = ["data_starved"]
# batch = 20
# steps = 36
# warmup = 12
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = "Molecules(molecules, precompute=False)"
# new = "Molecules(molecules, precompute=True)"
# ///
"""A graph transformer for solubility; distances and Laplacian positions of a molecule are computed on each access."""

import numpy as np
import torch
from scipy.sparse import csgraph
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
ATOMS, NODES, MAX_HOPS, WALK, POSITIONS = 9, 44, 12, 16, 8


def random_molecule(rng):
    adjacency = np.zeros((NODES, NODES))
    for v in range(1, NODES):
        u = max(0, v - int(rng.integers(1, 4)))
        adjacency[u, v] = adjacency[v, u] = 1
    for u, v in rng.integers(0, NODES, (6, 2)):
        if u != v:
            adjacency[u, v] = adjacency[v, u] = 1
    return rng.integers(0, ATOMS, NODES), adjacency, float(rng.normal())


def hop_distances(adjacency):
    hops = csgraph.shortest_path(adjacency, method="D", unweighted=True, directed=False)
    return np.minimum(hops, MAX_HOPS).astype(np.int64)


def laplacian_positions(adjacency):
    scale = 1 / np.sqrt(np.maximum(adjacency.sum(1), 1))
    laplacian = np.eye(NODES) - scale[:, None] * adjacency * scale
    _, vectors = np.linalg.eigh(laplacian)
    return vectors[:, 1 : POSITIONS + 1]


def return_probabilities(adjacency):
    """Of random walks of 1, 2, ... steps."""
    walk = adjacency / adjacency.sum(1, keepdims=True)
    power, found = np.eye(NODES), []
    for _ in range(WALK):
        power = power @ walk
        found.append(np.diag(power))
    return np.stack(found, axis=1)


class Molecules(Dataset):
    def __init__(self, molecules, precompute=False):
        self.molecules = molecules
        self.ready = [self.featurize(m) for m in molecules] if precompute else None

    def featurize(self, molecule):
        atoms, adjacency, target = molecule
        where = np.concatenate([laplacian_positions(adjacency), return_probabilities(adjacency)], axis=1)
        return (
            torch.from_numpy(atoms),
            torch.from_numpy(where.astype(np.float32)),
            torch.from_numpy(hop_distances(adjacency)),
            torch.tensor(target),
        )

    def __len__(self):
        return len(self.molecules)

    def __getitem__(self, index):
        if self.ready is not None:
            return self.ready[index]
        return self.featurize(self.molecules[index])


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x, bias):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.norm2(x))


class GraphTransformer(nn.Module):
    def __init__(self, dim=64, heads=4, depth=2):
        super().__init__()
        self.atom = nn.Embedding(ATOMS, dim)
        self.where = nn.Linear(POSITIONS + WALK, dim)
        self.hops = nn.Embedding(MAX_HOPS + 1, heads)
        self.layers = nn.ModuleList([Layer(dim, heads) for _ in range(depth)])
        self.readout = nn.Linear(dim, 1)

    def forward(self, atoms, where, hops):
        x = self.atom(atoms) + self.where(where)
        bias = self.hops(hops).permute(0, 3, 1, 2)
        for layer in self.layers:
            x = layer(x, bias)
        return self.readout(x.mean(1)).squeeze(-1)


def train_epoch(model, loader, optimizer):
    model.train()
    total = torch.zeros(())
    for atoms, where, hops, target in loader:
        loss = nn.functional.l1_loss(model(atoms, where, hops), target.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total / len(loader)


rng = np.random.default_rng(0)
molecules = [random_molecule(rng) for _ in range(240)]
model = GraphTransformer()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, fused=True)

# %% the training cell
dataset = Molecules(molecules, precompute=False)
loader = DataLoader(dataset, batch_size=20, shuffle=True)
history = []
for epoch in range(15):
    history.append(train_epoch(model, loader, optimizer))
print([round(float(h), 3) for h in history])
