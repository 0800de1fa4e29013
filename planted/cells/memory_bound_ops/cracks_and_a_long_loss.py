# /// cell
# causes = ["memory_bound_ops"]
# because = "some thirty operations on half a million logits, each of which goes through memory, forward and backward"
# batch = 8
# steps = 12
# warmup = 3
# cohort = "2026-11-21d"
#
# [[cure]]
# old = "criterion = crack_loss"
# new = "criterion = torch.compile(crack_loss)"
# ///
"""Cracks in concrete are marked pixel by pixel; the loss, of three papers at once, is written out term by term."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(31)
SIDE = 256
walls = torch.randn(96, 1, SIDE, SIDE)
cracks = (torch.rand(96, 1, SIDE, 1) < 0.02).float().expand(-1, -1, -1, SIDE).contiguous()
walls -= cracks


class Marker(nn.Module):
    """Sees patches of 8 by 8 and says what each of their pixels is."""

    def __init__(self, width=24):
        super().__init__()
        self.down = nn.Conv2d(1, width, 8, stride=8)
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(width, width, 1), nn.ReLU())
        self.up = nn.Sequential(nn.Conv2d(width, 64, 1), nn.PixelShuffle(8))

    def forward(self, x):
        return self.up(self.body(self.down(x)))


def crack_loss(logits, truth, gamma=2.0, alpha=0.8, beta=0.7, eps=1e-6):
    """Focal, Tversky and a squared hinge with a margin, added up"""
    p = 1 / (1 + torch.exp(-logits))
    p = p.clamp(eps, 1 - eps)
    focal = -alpha * truth * (1 - p) ** gamma * torch.log(p)
    focal = focal - (1 - alpha) * (1 - truth) * p**gamma * torch.log(1 - p)
    hit, false, missed = (p * truth).sum(), (p * (1 - truth)).sum(), ((1 - p) * truth).sum()
    tversky = 1 - (hit + 1) / (hit + (1 - beta) * false + beta * missed + 1)
    sign = 2 * truth - 1
    hinge = (1.5 - logits * sign).clamp(min=0) ** 2
    hinge = torch.where(hinge > 4, 4 * hinge.clamp(min=eps).sqrt() - 4, hinge) * (0.2 + truth)
    return focal.mean() + tversky + 0.1 * hinge.mean()


criterion = crack_loss

# %% the training cell
model = Marker()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, foreach=True)
loader = DataLoader(TensorDataset(walls, cracks), batch_size=8, shuffle=True, drop_last=True)
for epoch in range(8):
    for wall, crack in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(wall), crack)
        loss.backward()
        optimizer.step()
    print(f"[{epoch}] {loss.item():.3f}")
