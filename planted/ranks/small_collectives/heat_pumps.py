# /// cell
# cause = "small_collectives"
# because = "whether a gradient is finite everywhere is asked of each of 128 parameters: 128 exchanges of 4 bytes"
# cohort = "2026-11-27"
# written_ms = 92.4
# without_ms = 23.4
#
# [[without]]
# old = "        dist.all_reduce(fine, op=dist.ReduceOp.MIN)\n"
# new = ""
# ///
"""Power of heat pumps, a small network for each of 32 models of them; a step with a NaN is skipped by all."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

PUMPS, READINGS = 32, 20


class Pumps(nn.Module):
    """One network for each model."""

    def __init__(self) -> None:
        super().__init__()
        self.pumps = nn.ModuleList(
            nn.Sequential(nn.Linear(READINGS, 32), nn.SiLU(), nn.Linear(32, 1)) for _ in range(PUMPS)
        )

    def forward(self, readings):
        return torch.cat([pump(readings[:, i]) for i, pump in enumerate(self.pumps)], dim=1)


def all_finite(net: nn.Module) -> bool:
    """Of all gradients in all ranks."""
    answer = True
    for parameter in net.parameters():
        fine = torch.isfinite(parameter.grad).all().float()
        dist.all_reduce(fine, op=dist.ReduceOp.MIN)
        answer &= bool(fine.item())
    return answer


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(6)
net = DDP(Pumps())
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, foreach=True)
generator = torch.Generator().manual_seed(60 + rank)
readings = torch.randn(3000, PUMPS, READINGS, generator=generator)
power = readings[..., 0].abs() + 0.1 * readings[..., 1]
skipped = 0
for step in range(70):
    rows = torch.randint(0, 3000, (64,), generator=generator)
    loss = nn.functional.huber_loss(net(readings[rows]), power[rows])
    optimizer.zero_grad()
    loss.backward()
    if all_finite(net):
        optimizer.step()
    else:
        skipped += 1
    if rank == 0 and step % 40 == 0:
        print(f"step {step}: {loss.item():.4f}, {skipped} skipped")
dist.destroy_process_group()
