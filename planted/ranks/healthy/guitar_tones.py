# /// cell
# cause = "healthy"
# because = "dilated convolutions over much sound, then one all-reduce of 0.1 MB; one error gathered in ten steps"
# cohort = "2026-11-27"
# written_ms = 112.4
# without_ms = 109.8
#
# [[without]]
# old = "    dist.all_reduce(flat)\n"
# new = ""
# ///
"""An amplifier learned from what goes in and what comes out."""

import torch
import torch.distributed as dist
from torch import nn


class Layer(nn.Module):
    """A gated convolution that looks back 2 * dilation samples."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.back = 2 * dilation
        self.both = nn.Conv1d(24, 48, 3, dilation=dilation)
        self.mix = nn.Conv1d(24, 24, 1)

    def forward(self, x):
        signal, gate = self.both(nn.functional.pad(x, (self.back, 0))).chunk(2, dim=1)
        return x + self.mix(signal.tanh() * gate.sigmoid())


def share(net: nn.Module) -> None:
    """Average what the processes found."""
    gradients = [parameter.grad for parameter in net.parameters()]
    flat = torch.cat([gradient.view(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, new in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(new.view_as(gradient))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(440)
net = nn.Sequential(nn.Conv1d(1, 24, 1), *(Layer(2**i) for i in range(8)), nn.Conv1d(24, 1, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
generator = torch.Generator().manual_seed(rank)
strings = torch.randn(160, 1, 2048, generator=generator).cumsum(2) * 0.05
heard = torch.tanh(3 * strings)
for step in range(70):
    rows = torch.randint(0, 160, (4,), generator=generator)
    error = (net(strings[rows]) - heard[rows]).square().mean()
    optimizer.zero_grad()
    error.backward()
    share(net)
    optimizer.step()
    if step % 10 == 0:
        errors = [torch.zeros(()) for _ in range(world)]
        dist.all_gather(errors, error.detach())
        if rank == 0:
            print(f"step {step}: {torch.stack(errors).mean():.5f}")
dist.destroy_process_group()
