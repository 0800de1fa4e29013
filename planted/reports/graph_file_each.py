# /// cell
# because = "The dataset loads each small graph from its own .pt file with torch.load at every access (on-disk Dataset instead of an in-memory one), in every epoch anew."
# thread = "https://github.com/pyg-team/pytorch_geometric/issues/1294"
# line = "return torch.load(os.path.join(self.root, f\"data_{i}.pt\"))"
# callee = "torch.load"
# faster = 5.61
# ///
import os, tempfile
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
root = tempfile.mkdtemp()
N_GRAPHS = 900
for i in range(N_GRAPHS):
    n = int(torch.randint(8, 24, (1,)))
    edge_index = torch.randint(0, n, (2, 3 * n))
    torch.save({"x": torch.randn(n, 16), "edge_index": edge_index, "y": torch.tensor(i % 2)}, os.path.join(root, f"data_{i}.pt"))


class Molecules(Dataset):
    def __init__(self, root):
        self.root = root

    def __len__(self):
        return N_GRAPHS

    def __getitem__(self, i):
        return torch.load(os.path.join(self.root, f"data_{i}.pt"))


def collate(graphs):
    sizes = torch.tensor([g["x"].shape[0] for g in graphs])
    offsets = torch.cumsum(sizes, 0) - sizes
    x = torch.cat([g["x"] for g in graphs])
    edges = torch.cat([g["edge_index"] + o for g, o in zip(graphs, offsets)], 1)
    batch = torch.repeat_interleave(torch.arange(len(graphs)), sizes)
    return x, edges, batch, torch.stack([g["y"] for g in graphs])


class GIN(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.lin1, self.lin2, self.out = nn.Linear(16, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 2)

    def propagate(self, x, edges):
        return x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])

    def forward(self, x, edges, batch, n):
        x = torch.relu(self.lin1(self.propagate(x, edges)))
        x = torch.relu(self.lin2(self.propagate(x, edges)))
        return self.out(torch.zeros(n, x.shape[1]).index_add(0, batch, x))


dataset = Molecules(root)
train_loader = DataLoader(dataset, batch_size=64, shuffle=True, collate_fn=collate)
model = GIN()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
# %% the training cell
for epoch in range(1, 11):
    total = 0
    for x, edges, batch, y in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x, edges, batch, len(y)), y)
        loss.backward()
        optimizer.step()
        total += float(loss) * len(y)
    print(f"Epoch {epoch:02d}, loss {total / len(dataset):.4f}")
