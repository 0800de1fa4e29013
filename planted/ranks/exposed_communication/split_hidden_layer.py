# /// cell
# cause = "exposed_communication"
# because = "tensor parallel: activations of 13 MB are summed over the ranks three times a step, and layers wait"
# cohort = "2026-11-25b"
# written_ms = 138.1
# without_ms = 99.6
#
# [[without]]
# old = "        dist.all_reduce(total)\n"
# new = ""
#
# [[without]]
# old = "        dist.all_reduce(gradient)\n"
# new = ""
# ///
"""A neural field of densities; the hidden layers are split between the processes, the points are not."""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function

POINTS, WIDTH, HIDDEN = 8192, 384, 64


class FromAll(Function):
    """Forward the sum over the processes, backward the gradient as it is."""

    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class ToAll(Function):
    """Forward the tensor as it is, backward the sum of the gradients."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class SplitBlock(nn.Module):
    """This process's columns of the hidden layer."""

    def __init__(self, width_in: int, width_out: int, rank: int, world: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.up = nn.Parameter(torch.randn(width_in, HIDDEN // world, generator=generator) / width_in**0.5)
        self.down = nn.Parameter(torch.randn(HIDDEN // world, width_out, generator=generator) / HIDDEN**0.5)

    def forward(self, x):
        return FromAll.apply(torch.sin(ToAll.apply(x) @ self.up) @ self.down)


class Field(nn.Module):
    """Coordinates to density."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.first = SplitBlock(3, WIDTH, rank, world)
        self.second = SplitBlock(WIDTH, WIDTH, rank, world)
        self.density = nn.Parameter(torch.full((WIDTH, 1), 0.01))

    def forward(self, points):
        return self.second(self.first(points)) @ self.density


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
field = Field(rank, world)
optimizer = torch.optim.Adam(field.parameters(), lr=1e-3)
same = torch.Generator().manual_seed(99)
for step in range(100):
    points = torch.rand(POINTS, 3, generator=same)
    density = (points.square().sum(1, keepdim=True) < 1).float()
    optimizer.zero_grad()
    loss = (field(points) - density).square().mean()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 20 == 0:
        print(f"{step:5} {loss.item():.4f}")
dist.destroy_process_group()
