# /// cell
# cause = "small_collectives"
# because = "a loop averages the gradients of 196 small parameters, one all-reduce for each"
# cohort = "2026-11-25a"
# written_ms = 299.5
# without_ms = 28.6
#
# [[without]]
# old = """
#         for parameter in net.parameters():
#             dist.all_reduce(parameter.grad)
#             parameter.grad /= world
# """
# new = """
#         flat = torch.cat([parameter.grad.view(-1) for parameter in net.parameters()])
#         dist.all_reduce(flat)
#         flat /= world
#         parts = flat.split([parameter.numel() for parameter in net.parameters()])
#         gradients = [parameter.grad for parameter in net.parameters()]
#         torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients)])
# """
# ///
"""A mixture of 48 small experts, data parallel by hand as in the first tutorials."""

import torch
import torch.distributed as dist
from torch import nn


class Experts(nn.Module):
    """Each expert sees all; a gate weighs them."""

    def __init__(self, count: int = 48) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 1)) for _ in range(count)
        )
        self.gate = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, count), nn.Softmax(dim=1))

    def forward(self, x):
        answers = torch.cat([expert(x) for expert in self.experts], dim=1)
        return (self.gate(x) * answers).sum(1)


def run(rank: int, world: int) -> None:
    """All steps."""
    torch.manual_seed(0)
    net = Experts()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, foreach=True)
    torch.manual_seed(rank)
    x = torch.randn(8192, 40)
    y = x[:, 0] * x[:, 1]
    for step in range(500):
        rows = torch.randint(0, 8192, (96,))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x[rows]), y[rows])
        loss.backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        if rank == 0 and step % 100 == 0:
            print(step, loss.item())


dist.init_process_group("gloo")
run(dist.get_rank(), dist.get_world_size())
dist.destroy_process_group()
