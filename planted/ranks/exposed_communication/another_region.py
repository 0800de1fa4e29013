# /// cell
# cause = "exposed_communication"
# because = "the ranks are in two regions: a communication hook waits 40 ms before each of two buckets"
# cohort = "2026-11-25a"
# written_ms = 173.1
# without_ms = 86.0
#
# [[without]]
# old = "ROUND_TRIP_S = 0.04"
# new = "ROUND_TRIP_S = 0.0"
# ///
"""Sensor windows, with one half of the ranks in another region."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

ROUND_TRIP_S = 0.04


def far_away(group, bucket):
    """The usual all-reduce, after the time that the answer of the other region takes."""
    time.sleep(ROUND_TRIP_S)
    return allreduce_hook(group, bucket)


class Windows(nn.Module):
    """Some convolutions, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(6, 64, 7, padding=3)
        self.second = nn.Conv1d(64, 96, 7, padding=3, stride=2)
        self.third = nn.Conv1d(96, 128, 7, padding=3, stride=2)
        self.hidden = nn.Linear(128 * 16, 384)
        self.out = nn.Linear(384, 6)

    def forward(self, x):
        x = self.third(self.second(self.first(x).relu()).relu()).relu()
        return self.out(self.hidden(nn.functional.adaptive_avg_pool1d(x, 16).flatten(1)).relu())


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(3)
model = DistributedDataParallel(Windows(), bucket_cap_mb=1)
model.register_comm_hook(dist.group.WORLD, far_away)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(rank)
windows = TensorDataset(torch.randn(768, 6, 128, generator=generator), torch.randint(0, 6, (768,), generator=generator))
for epoch in range(6):
    total = 0.0
    for x, y in DataLoader(windows, batch_size=48, shuffle=True, drop_last=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"[{rank}] epoch {epoch}: {total / 16:.3f}")
dist.destroy_process_group()
