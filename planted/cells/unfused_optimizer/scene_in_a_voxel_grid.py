# /// cell
# causes = ["unfused_optimizer"]
# because = "Adam goes a dozen times through two million cells, their gradients and averages"
# batch = 256
# profiled = 100
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = "foreach=False"
# new = "fused=True"
# ///
"""A scene is fitted from its pictures as a grid of densities and colours, without a network, by Adam."""

import torch
from torch.nn import functional as F

torch.manual_seed(27)
SIDE, SAMPLES = 80, 12


def rays(n):
    """Where n rays begin, on a sphere around the scene, and where they go."""
    start = F.normalize(torch.randn(n, 3), dim=1) * 1.7
    return start, F.normalize(0.4 * torch.randn(n, 3) - start, dim=1)


def photograph(start, towards):
    """The scene is a ball in two colours."""
    along = -(start * towards).sum(1, keepdim=True)
    nearest = start + along * towards
    hit = (nearest.norm(dim=1, keepdim=True) < 0.6).float()
    return hit * torch.cat([nearest.sign().clamp(0, 1)[:, :2], torch.ones(len(start), 1)], 1)


class Grid(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = torch.nn.Parameter(0.01 * torch.randn(1, 4, SIDE, SIDE, SIDE))
        self.register_buffer("depths", torch.linspace(0.6, 2.8, SAMPLES))

    def forward(self, start, towards):
        points = start.unsqueeze(1) + self.depths.view(1, -1, 1) * towards.unsqueeze(1)
        found = F.grid_sample(self.cells, points.view(1, 1, 1, -1, 3), align_corners=True)
        found = found.view(4, len(start), SAMPLES)
        opaque = 1 - torch.exp(-F.softplus(found[0]) * 0.2)
        clear = torch.cumprod(torch.cat([torch.ones(len(start), 1), 1 - opaque[:, :-1]], 1), 1)
        return torch.einsum("rs,crs->rc", opaque * clear, found[1:].sigmoid())


start, towards = rays(40_000)
colours = photograph(start, towards)
grid = Grid()
optimizer = torch.optim.Adam([{"params": grid.cells, "lr": 0.05}], betas=(0.9, 0.99), foreach=False)

# %% the training cell
for epoch in range(2):
    for chosen in torch.randperm(len(start)).split(256):
        seen = grid(start[chosen], towards[chosen])
        loss = F.mse_loss(seen, colours[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"psnr {-10 * torch.log10(loss.detach()):.1f} dB")
