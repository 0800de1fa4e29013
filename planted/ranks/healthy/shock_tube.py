# /// cell
# cause = "healthy"
# because = "second derivatives at 3,000 points in both ranks, then one all-reduce of 0.2 MB"
# cohort = "2026-11-25b"
# written_ms = 167.2
# without_ms = 166.8
# clock = "exchange alone"
#
# [[without]]
# old = "        dist.all_reduce(gradient)\n"
# new = ""
# ///
"""Burgers' equation without a mesh: a network that is to satisfy it where it is asked."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import grad

VISCOSITY = 0.01 / math.pi
INSIDE, EDGE = 3000, 300


def residual(net: nn.Module, place: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    """What is left of the equation."""
    place.requires_grad_()
    time.requires_grad_()
    u = net(torch.cat([place, time], dim=1))
    u_t, u_x = grad(u.sum(), (time, place), create_graph=True)
    (u_xx,) = grad(u_x.sum(), place, create_graph=True)
    return u_t + u * u_x - VISCOSITY * u_xx


def train(rank: int, world: int) -> nn.Module:
    torch.manual_seed(1234)
    layers = [nn.Linear(2, 128), nn.Tanh()]
    for _ in range(3):
        layers += [nn.Linear(128, 128), nn.Tanh()]
    net = nn.Sequential(*layers, nn.Linear(128, 1))
    parameters = list(net.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 110)
    torch.manual_seed(rank)
    for iteration in range(110):
        inside = residual(net, 2 * torch.rand(INSIDE, 1) - 1, torch.rand(INSIDE, 1)).square().mean()
        x = 2 * torch.rand(EDGE, 1) - 1
        start = (net(torch.cat([x, torch.zeros_like(x)], 1)) + torch.sin(math.pi * x)).square().mean()
        t = torch.rand(EDGE, 1)
        wall = sum(net(torch.cat([torch.full_like(t, side), t], 1)).square().mean() for side in (-1.0, 1.0))
        gradients = grad(inside + start + wall, parameters)
        gradient = torch.cat([g.reshape(-1) for g in gradients]) / world
        dist.all_reduce(gradient)
        for parameter, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
        scheduler.step()
        if rank == 0 and iteration % 25 == 0:
            print(f"{iteration:4d}  inside {inside.item():.2e}  start {start.item():.2e}  wall {wall.item():.2e}")
    return net


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
