# /// cell
# causes = ["cpu_oversubscribed"]
# because = "sixteen compute threads on two cores, for products that one core does in a fraction of a millisecond"
# batch = 64
# steps = 20
# fresh = true
# cohort = "2026-11-23"
#
# [[cure]]
# old = "torch.set_num_threads(16)"
# new = "torch.set_num_threads(1)"
# ///
# jet tagging: top quark vs QCD.  a GRU over the 30 leading constituents
import time

import torch
from torch import nn

# lxplus node: 16 cores
torch.set_num_threads(16)
torch.manual_seed(13)


def jets(n, n_const=30):
    """pT sorted, eta and phi relative to the axis; tops get three prongs, QCD one"""
    top = torch.randint(0, 2, (n,))
    prongs = torch.randn(n, 3, 2) * 0.3 * top.view(-1, 1, 1)
    which = torch.randint(0, 3, (n, n_const))
    centre = torch.gather(prongs, 1, which.unsqueeze(-1).expand(-1, -1, 2))
    xy = centre + 0.1 * torch.randn(n, n_const, 2)
    pt = torch.rand(n, n_const, 1).pow(4).sort(1, descending=True).values
    return torch.cat([pt.div(pt.sum(1, keepdim=True)).log(), xy, (xy**2).sum(-1, keepdim=True).sqrt()], -1), top


class JetReader(nn.Module):
    """reads the constituents from the hardest to the softest"""

    def __init__(self, w=192):
        super().__init__()
        self.cell = nn.GRUCell(4, w)
        self.tag = nn.Linear(w, 2)

    def forward(self, constituents):
        h = constituents.new_zeros(len(constituents), self.cell.hidden_size)
        for c in constituents.unbind(1):
            h = self.cell(c, h)
        return self.tag(h)


x, y = jets(9600)

# %% the training cell
reader = JetReader()
opt = torch.optim.Adam(reader.parameters(), lr=1e-3, fused=True)
t0 = time.time()
for ep in range(2):
    for sel in torch.randperm(len(x)).split(64):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(reader(x[sel]), y[sel])
        loss.backward()
        opt.step()
    print(f"ep {ep}  loss {loss.item():.3f}  {time.time() - t0:.1f} s")
