# /// cell
# cause = "exposed_communication"
# because = "one bucket holds all 34 MB of gradients, so it leaves after the backward pass; then new weights are broadcast"
# cohort = "2026-11-27"
# written_ms = 166.6
# without_ms = 97.4
#
# [[without]]
# old = "    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9)\n"
# new = """
#     optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
#     model.require_backward_grad_sync = False
# """
# ///
"""Wakes in a wind farm: power of all turbines from wind of all masts; each process keeps half the optimizer's state."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH = 1448, 32


class Wakes(nn.Module):
    """Four wide layers, each added to what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def fit(rank: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Wakes(), bucket_cap_mb=512)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    winds = torch.randn(1024, WIDTH, generator=generator)
    for step in range(64):
        rows = torch.randint(0, 1024, (BATCH,), generator=generator)
        optimizer.zero_grad()
        loss = (model(winds[rows]) - winds[rows].clamp(-1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 24 == 0:
            print(f"step {step}: {loss.item():.4f}")


dist.init_process_group("gloo")
fit(dist.get_rank())
dist.destroy_process_group()
