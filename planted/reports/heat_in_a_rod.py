# /// cell
# cohort = "second"
# because = "healthy"
# ///
import math

import torch
import torch.nn as nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.999)
x_start = torch.linspace(0, 1, 200)[:, None]
start = torch.cat([x_start, torch.zeros_like(x_start)], 1)
u_start = torch.sin(math.pi * x_start)
ends = torch.cat([torch.tensor([0.0, 1.0]).repeat(100)[:, None], torch.rand(200, 1)], 1)


def residual(points):
    points = points.requires_grad_(True)
    u = net(points)
    du = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
    u_xx = torch.autograd.grad(du[:, 0].sum(), points, create_graph=True)[0][:, 0]
    return du[:, 1] - 0.1 * u_xx


# %% the training cell
for step in range(300):
    physics = residual(torch.rand(1500, 2)).pow(2).mean()
    edge = (net(start) - u_start).pow(2).mean() + net(ends).pow(2).mean()
    loss = physics + 10 * edge
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 60 == 0:
        print(f"{step:4d} {loss.item():.5f}")
print("last", loss.item())
