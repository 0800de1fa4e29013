# /// cell
# cause = "uneven_data"
# because = "batches were chosen by the cards' memory: 16 samples in a step of rank 0, 184 in one of rank 1"
# cohort = "2026-11-25a"
# written_ms = 148.0
# without_ms = 74.6
# clock = "processor"
#
# [[without]]
# old = "BATCH = {0: 16, 1: 184}"
# new = "BATCH = {0: 100, 1: 100}"
# ///
"""Orbits to classes; the larger card takes the larger batch, which was meant well."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = {0: 16, 1: 184}  # 2 GB, 24 GB


class Orbits(nn.Module):
    """A recurrent network over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 192, batch_first=True)
        self.head = nn.Linear(192, 5)

    def forward(self, positions):
        states, _ = self.gru(positions)
        return self.head(states[:, -1])


dist.init_process_group("gloo")
rank = dist.get_rank()
batch = BATCH[rank]
torch.manual_seed(0)
model = DistributedDataParallel(Orbits())
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
generator = torch.Generator().manual_seed(rank)
positions = torch.randn(4000, 40, 6, generator=generator)
kinds = torch.randint(0, 5, (4000,), generator=generator)
for step in range(130):
    chosen = torch.randint(0, 4000, (batch,), generator=generator)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(positions[chosen]), kinds[chosen])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 50 == 0:
        print(f"rank {rank} step {step} loss {loss.item():.3f}")
dist.destroy_process_group()
