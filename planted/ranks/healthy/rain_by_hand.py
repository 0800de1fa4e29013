# /// cell
# cause = "healthy"
# because = "four micro-batches before one all-reduce of 0.6 MB, and one reduced loss read by .item() in a step"
# cohort = "2026-11-25a"
# written_ms = 86.6
# without_ms = 84.6
# clock = "exchange alone"
#
# [[without]]
# old = "        dist.all_reduce(flat)\n"
# new = ""
#
# [[without]]
# old = "        dist.all_reduce(mean)\n"
# new = ""
# ///
"""Rain of the next hour from the hours before; gradients are accumulated, then averaged by hand."""

import torch
import torch.distributed as dist
from torch import nn


class Rain(nn.Module):
    """A recurrent network over the hours."""

    def __init__(self) -> None:
        super().__init__()
        self.hours = nn.LSTM(24, 160, batch_first=True)
        self.amount = nn.Linear(160, 1)

    def forward(self, x):
        return self.amount(self.hours(x)[0][:, -1])


def train(rank: int, world: int) -> None:
    """A hundred updates."""
    torch.manual_seed(0)
    net = Rain()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    torch.manual_seed(rank + 10)
    weather = torch.randn(2048, 48, 24)
    rain = weather[:, -6:, 0].mean(1, keepdim=True)
    for step in range(90):
        optimizer.zero_grad()
        total = torch.zeros(())
        for rows in torch.randint(0, 2048, (4, 32)):
            loss = nn.functional.mse_loss(net(weather[rows]), rain[rows]) / 4
            loss.backward()
            total += loss.detach()
        flat = torch.cat([p.grad.flatten() for p in net.parameters()])
        dist.all_reduce(flat)
        parts = flat.div_(world).split([p.numel() for p in net.parameters()])
        for parameter, part in zip(net.parameters(), parts, strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        optimizer.step()
        mean = total / world
        dist.all_reduce(mean)
        if mean.item() < 1e-4:
            break
        if rank == 0 and step % 30 == 0:
            print(f"step {step}: {mean.item():.4f}")


dist.init_process_group("gloo")
train(dist.get_rank(), dist.get_world_size())
dist.destroy_process_group()
