# /// cell
# cohort = "second"
# because = "For each step's negative edges, all pairs of nodes are listed from a dense N x N mask (nonzero) to pick a few thousand; drawing random pairs and rejecting the real edges is enough."
# thread = "https://github.com/pyg-team/pytorch_geometric/issues/628"
# line = "absent = mask.nonzero()"
# callee = "torch.Tensor.nonzero"
# faster = 3.95
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)
n = 2000
group = torch.randint(8, (n,))
src, dst = torch.randint(n, (2, 60_000))
keep = (group[src] == group[dst]) & (src != dst)
edges = torch.stack([src[keep], dst[keep]])
edges = torch.cat([edges, edges.flip(0)], 1).unique(dim=1)
degree = torch.bincount(edges[1], minlength=n).clamp(min=1).float()
features = torch.randn(n, 32)


def negative_edges(edges, n, count):
    mask = torch.ones(n, n, dtype=torch.bool)
    mask[edges[0], edges[1]] = False
    mask.fill_diagonal_(False)
    absent = mask.nonzero()
    return absent[torch.randint(len(absent), (count,))].T


class Sage(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.own, self.near = nn.Linear(d_in, d_out), nn.Linear(d_in, d_out, bias=False)

    def forward(self, x):
        gathered = torch.zeros(n, x.shape[1]).index_add(0, edges[1], x[edges[0]]) / degree[:, None]
        return self.own(x) + self.near(gathered)


encoder = nn.Sequential(Sage(32, 32), nn.ReLU(), Sage(32, 16))
optimizer = torch.optim.Adam(encoder.parameters(), lr=5e-3)
# %% the training cell
for epoch in range(80):
    z = encoder(features)
    negative = negative_edges(edges, n, edges.shape[1])
    pos = (z[edges[0]] * z[edges[1]]).sum(1)
    neg = (z[negative[0]] * z[negative[1]]).sum(1)
    loss = nn.functional.softplus(-pos).mean() + nn.functional.softplus(neg).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 20 == 0:
        print(epoch, loss.item())
print("last", loss.item())
