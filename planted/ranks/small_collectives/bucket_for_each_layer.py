# /// cell
# cause = "small_collectives"
# because = "bucket_cap_mb=0.001 gives each of 120 layers a bucket of its own, of 10 kB"
# cohort = "2026-11-25a"
# written_ms = 162.5
# without_ms = 35.6
#
# [[without]]
# old = "bucket_cap_mb=0.001"
# new = "bucket_cap_mb=25"
# ///
"""A deep, narrow residual network for tabular data."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """x + f(x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(x).relu()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(5)
net = nn.Sequential(*[Block(48) for _ in range(120)], nn.Linear(48, 4))
model = DistributedDataParallel(net, bucket_cap_mb=0.001)  # so that the exchange begins at once
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
generator = torch.Generator().manual_seed(rank)
rows = torch.randn(4096, 48, generator=generator)
loader = DataLoader(TensorDataset(rows, (rows[:, 0] > 0).long()), batch_size=64, shuffle=True)
for epoch in range(6):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch} loss {loss.item():.3f}")
dist.destroy_process_group()
