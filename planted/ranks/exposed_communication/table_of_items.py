# /// cell
# cause = "exposed_communication"
# because = "the gradient of a table of 200,000 items is dense: 51 MB are exchanged for a step of little compute"
# cohort = "2026-11-25a"
# written_ms = 212.9
# without_ms = 107.7
#
# [[without]]
# old = "model = DistributedDataParallel(Recommender())\n"
# new = "model = DistributedDataParallel(Recommender())\nmodel.require_backward_grad_sync = False\n"
# ///
"""A recommender: what was bought together."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ITEMS = 200_000


class Recommender(nn.Module):
    """A table of items and a small tower."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ITEMS, 64, mode="mean")
        self.tower = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 200))

    def forward(self, basket):
        return self.tower(self.table(basket))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(Recommender())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(10 + rank)
baskets = torch.randint(0, ITEMS, (20_000, 12), generator=generator)
departments = torch.randint(0, 200, (20_000,), generator=generator)
for step in range(90):
    rows = torch.randint(0, len(baskets), (1024,), generator=generator)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(baskets[rows]), departments[rows])
    loss.backward()
    optimizer.step()
    if step % 30 == 0 and rank == 0:
        print(f"step {step}: {loss.item():.3f}")
dist.destroy_process_group()
