# /// cell
# cohort = "fourth"
# because = "The count matrix comes from the R export in CSC format; taking a minibatch of rows out of a CSC matrix walks over all its non-zeros at every step. Cure: convert it once to CSR (scipy.sparse.csr_matrix), row slicing is then cheap."
# thread = "https://github.com/cellgeni/sceasy/issues/69"
# line = "x = torch.from_numpy(counts[rows].toarray())"
# callee = "scipy.sparse.csc_matrix.__getitem__"
# faster = 5.7
# ///
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy import sparse

torch.manual_seed(0)
folder = tempfile.mkdtemp()
path = os.path.join(folder, "tissue.npz")

n_cells, n_genes, n_types = 40000, 4000, 12


def export_tissue(path):
    rng = np.random.default_rng(3)
    kinds = rng.integers(0, n_types, n_cells)
    programs = rng.dirichlet(np.full(n_genes, 0.08), n_types)
    columns, rows = [], []
    for kind in range(n_types):
        cells = np.flatnonzero(kinds == kind)
        reads = rng.poisson(320, len(cells))
        rows.append(np.repeat(cells, reads))
        columns.append(rng.choice(n_genes, reads.sum(), p=programs[kind]))
    rows = np.concatenate(rows)
    columns = np.concatenate(columns)
    data = np.ones(len(rows), dtype=np.float32)
    tissue = sparse.coo_matrix((data, (rows, columns)), shape=(n_cells, n_genes))
    sparse.save_npz(path, tissue.tocsc(), compressed=False)


export_tissue(path)
counts = sparse.load_npz(path)


class CellVAE(nn.Module):
    def __init__(self, genes, hidden=64, latent=8):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(genes, hidden), nn.ReLU())
        self.mean = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.decode = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, genes))

    def forward(self, x):
        h = self.encode(torch.log1p(x))
        mean, logvar = self.mean(h), self.logvar(h)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        return F.log_softmax(self.decode(z), dim=1), mean, logvar


model = CellVAE(n_genes)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
batch_size = 128

# %% the training cell
order = torch.randperm(n_cells).numpy()
for step, start in enumerate(range(0, n_cells - batch_size + 1, batch_size)):
    rows = order[start:start + batch_size]
    x = torch.from_numpy(counts[rows].toarray())
    log_rates, mean, logvar = model(x)
    likelihood = -(x * log_rates).sum(1).mean()
    kl = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).sum(1).mean()
    loss = likelihood + kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.2f}")
