# /// cell
# causes = ["layout"]
# because = "each layer copies all points to have the features last, and again to have them in the middle"
# batch = 8
# steps = 10
# warmup = 2
# cohort = "2026-11-23"
#
# [[cure]]
# old = '''
#         y = self.lin(x.transpose(1, 2).contiguous())
#         return y.transpose(1, 2).contiguous()
# '''
# new = '''
#         return self.lin(x)
# '''
#
# [[cure]]
# old = "return points.permute(0, 2, 1).contiguous()"
# new = "return points"
#
# [[cure]]
# old = "POINTS = 2"
# new = "POINTS = 1"
# ///
# Surface drifters: from 2048 positions + velocities in a box, is there an eddy in it, and which way does it turn?
# DeepSets. Arrays come from the Fortran side as (snapshot, drifter, quantity).
import torch
import torch.nn as nn

# axis of the drifters inside the network
POINTS = 2


def from_fortran(points):
    return points.permute(0, 2, 1).contiguous()


class PerPoint(nn.Module):
    """the same linear map for every drifter, (B, C, N) -> (B, C', N)"""

    def __init__(self, cin, cout):
        super().__init__()
        self.lin = nn.Linear(cin, cout)

    def forward(self, x):
        y = self.lin(x.transpose(1, 2).contiguous())
        return y.transpose(1, 2).contiguous()


class EddyNet(nn.Module):
    def __init__(self, c=24, blocks=6):
        super().__init__()
        self.first = PerPoint(4, c)
        self.blocks = nn.ModuleList([PerPoint(c, c) for _ in range(blocks)])
        self.last = nn.Linear(c, 3)

    def forward(self, x):
        x = self.first(x)
        for b in self.blocks:
            x = x + torch.relu(b(x))
        return self.last(x.amax(POINTS))


def make_boxes(n, drifters=2048):
    kind = torch.randint(0, 3, (n,))  # none, cyclone, anticyclone
    pos = torch.rand(n, drifters, 2) * 2 - 1
    centre = torch.rand(n, 1, 2) - 0.5
    d = pos - centre
    swirl = torch.stack([-d[..., 1], d[..., 0]], -1) * torch.exp(-(d**2).sum(-1, keepdim=True) / 0.08)
    vel = swirl * torch.tensor([0.0, 1.0, -1.0])[kind, None, None] + 0.1 * torch.randn(n, drifters, 2)
    return torch.cat([pos, vel], -1), kind


torch.manual_seed(5150)
boxes, kind = make_boxes(320)

# %% the training cell
model = EddyNet()
optim = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
xent = nn.CrossEntropyLoss()
for epoch in range(4):
    perm = torch.randperm(len(boxes))
    for k in range(0, len(boxes), 8):
        idx = perm[k : k + 8]
        loss = xent(model(from_fortran(boxes[idx])), kind[idx])
        optim.zero_grad()
        loss.backward()
        optim.step()
    print(epoch + 1, loss.item())
