# /// cell
# causes = ["memory_bound_ops"]
# because = """\
#   an activation of five operations on 400,000 numbers, each of which goes through memory, forward and backward"""
# batch = 25600
# steps = 12
# warmup = 3
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "torch.where(x > 0, x, self.a * (torch.exp(x) - 1))"
# new = "nn.functional.elu(x, self.a)"
# ///
"""A picture is learnt as a function of the place, with an activation written out after its paper."""

import torch
from torch import nn

torch.manual_seed(8)


class ELU(nn.Module):
    """x above zero, a (e^x - 1) below"""

    def __init__(self, a=1.0):
        super().__init__()
        self.a = a

    def forward(self, x):
        return torch.where(x > 0, x, self.a * (torch.exp(x) - 1))


class Picture(nn.Module):
    """Colours of places; the places go in as waves."""

    def __init__(self, width=16, depth=4, activation=ELU):
        super().__init__()
        self.register_buffer("waves", 3 * torch.randn(2, width // 2))
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), activation())]
        self.net = nn.Sequential(*layers, nn.Linear(width, 3))

    def forward(self, place):
        waves = place @ self.waves
        return self.net(torch.cat([waves.sin(), waves.cos()], -1))


side = 320
axis = torch.linspace(-1, 1, side)
places = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).view(-1, 2)
colours = torch.stack([places[:, 0].abs(), places.prod(-1), places.norm(dim=-1)], -1)
field = Picture()
optimizer = torch.optim.Adam(field.parameters(), lr=5e-3, fused=True)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)

# %% the training cell
errors = []
for epoch in range(30):
    for part in torch.randperm(side * side).chunk(4):
        loss = nn.functional.mse_loss(field(places[part]), colours[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    errors.append(loss.item())
