# /// cell
# cohort = "fourth"
# because = "To batch the molecules, the row pointers of every small CSR matrix are expanded to row/column entries on their own and the joined matrix is sorted and turned back into CSR: many small operations per matrix, hundreds of matrices per batch. Cure: join the CSR parts directly (concatenate row pointers, columns and values with their offsets)."
# thread = "https://github.com/pyg-team/pytorch_geometric/issues/8664"
# line = "row = torch.arange(bond.shape[0]).repeat_interleave(starts.diff())"
# callee = "torch.Tensor.repeat_interleave"
# faster = 1.9
# ///
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
rng = np.random.default_rng(1)
bond_types, atom_types = 4, 9


def draw_molecule():
    n = int(rng.integers(8, 25))
    atoms = torch.from_numpy(rng.integers(0, atom_types, n))
    first = np.arange(1, n)
    second = np.array([rng.integers(max(0, i - 3), i) for i in first])
    extra = rng.integers(0, n, (2, n // 4))
    extra = extra[:, extra[0] != extra[1]]
    a = np.concatenate([first, extra[0]])
    b = np.concatenate([second, extra[1]])
    kind = rng.integers(0, bond_types, len(a))
    bonds = []
    for k in range(bond_types):
        table = torch.zeros(n, n)
        table[a[kind == k], b[kind == k]] = 1.0
        table[b[kind == k], a[kind == k]] = 1.0
        bonds.append((table / table.sum(1, keepdim=True).clamp(min=1)).to_sparse_csr())
    energy = float((kind == 0).sum() - 0.5 * (kind == 2).sum() + 0.3 * (atoms < 3).sum()) / 5
    return atoms, bonds, energy


def bond_entries(bond):
    starts = bond.crow_indices()
    row = torch.arange(bond.shape[0]).repeat_interleave(starts.diff())
    return torch.stack([row, bond.col_indices()]), bond.values()


def join_bonds(bonds):
    entries, values = [], []
    n = 0
    for bond in bonds:
        index, value = bond_entries(bond)
        entries.append(index + n)
        values.append(value)
        n += bond.shape[0]
    joined = torch.sparse_coo_tensor(torch.cat(entries, dim=1), torch.cat(values), (n, n))
    return joined.coalesce().to_sparse_csr()


def collate(batch):
    atoms = torch.cat([item[0] for item in batch])
    sizes = torch.tensor([len(item[0]) for item in batch])
    owner = torch.repeat_interleave(torch.arange(len(batch)), sizes)
    bonds = [join_bonds([item[1][k] for item in batch]) for k in range(bond_types)]
    return atoms, bonds, owner, torch.tensor([item[2] for item in batch])


class BondNet(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(atom_types, dim)
        self.own = nn.Linear(dim, dim)
        self.along = nn.ModuleList([nn.Linear(dim, dim, bias=False) for _ in range(bond_types)])
        self.head = nn.Linear(dim, 1)

    def forward(self, atoms, bonds, owner, n):
        h = self.embed(atoms)
        out = self.own(h)
        for bond, linear in zip(bonds, self.along):
            out = out + bond @ linear(h)
        h = torch.relu(out)
        total = torch.zeros(n, h.shape[1]).index_add(0, owner, h)
        return self.head(total).squeeze(1)


molecules = [draw_molecule() for _ in range(2560)]
model = BondNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(molecules, batch_size=128, shuffle=True, collate_fn=collate)

# %% the training cell
for epoch in range(30):
    total = 0.0
    for atoms, bonds, owner, energy in loader:
        loss = (model(atoms, bonds, owner, len(energy)) - energy).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    if epoch % 5 == 4:
        print(f"epoch {epoch} loss {total / len(loader):.4f}")
