# /// cell
# because = "The messages are aggregated in a Python loop over the nodes, each time selecting its incoming edges with a mask; one index_add does it."
# line = "out.append(messages[dst == v].sum(0))"
# callee = "aggregate"
# faster = 4.0
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)
N, E = 150, 1200
src, dst = torch.randint(0, N, (E,)), torch.randint(0, N, (E,))
pos = torch.randn(N, 3)
edge_len = (pos[src] - pos[dst]).norm(dim=1, keepdim=True)
energy = torch.exp(-edge_len).squeeze(1).new_zeros(N).index_add(0, dst, torch.exp(-edge_len).squeeze(1))


def aggregate(messages, dst, n):
    out = []
    for v in range(n):
        out.append(messages[dst == v].sum(0))
    return torch.stack(out)


class MPNN(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.inp = nn.Linear(3, d)
        self.message = nn.Sequential(nn.Linear(2 * d + 1, d), nn.SiLU(), nn.Linear(d, d))
        self.update = nn.Sequential(nn.Linear(2 * d, d), nn.SiLU())
        self.out = nn.Linear(d, 1)

    def forward(self, pos):
        h = self.inp(pos)
        for _ in range(2):
            m = self.message(torch.cat([h[src], h[dst], edge_len], 1))
            h = self.update(torch.cat([h, aggregate(m, dst, N)], 1))
        return self.out(h).squeeze(1)


net = MPNN()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
# %% the training cell
for step in range(100):
    loss = (net(pos) - energy).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
