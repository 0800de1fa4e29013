# /// cell
# because = "Each GCN layer recomputes the symmetric normalisation of the same fixed graph (self-loops, coalesce, degrees) at each forward; it can be cached."
# thread = "https://github.com/VITA-Group/Deep_GCN_Benchmarking/issues/2"
# line = "A = normalise(edge_index, x.shape[0])"
# callee = "normalise (torch.sparse coalesce)"
# faster = 2.01
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)
N, E = 12_000, 90_000
edge_index = torch.randint(0, N, (2, E))
x, y = torch.randn(N, 48), torch.randint(0, 6, (N,))


def normalise(edges, n):
    loops = torch.arange(n).repeat(2, 1)
    full = torch.cat([edges, edges.flip(0), loops], 1)
    A = torch.sparse_coo_tensor(full, torch.ones(full.shape[1]), (n, n)).coalesce()
    degree = torch.sparse.sum(A, 1).to_dense().clamp(min=1)
    row, col = A.indices()
    return torch.sparse_coo_tensor(A.indices(), A.values() / (degree[row] * degree[col]).sqrt(), (n, n), is_coalesced=True)


class GCNConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.lin = nn.Linear(i, o)

    def forward(self, x, edge_index):
        A = normalise(edge_index, x.shape[0])
        return torch.sparse.mm(A, self.lin(x))


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(48, 32), GCNConv(32, 32), GCNConv(32, 6)])

    def forward(self, x, edge_index):
        for conv in self.convs[:-1]:
            x = torch.relu(conv(x, edge_index))
        return self.convs[-1](x, edge_index)


gcn = GCN()
optimizer = torch.optim.Adam(gcn.parameters(), lr=0.01)
# %% the training cell
for epoch in range(40):
    loss = nn.functional.cross_entropy(gcn(x, edge_index), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 10 == 0:
        print(epoch, loss.item())
