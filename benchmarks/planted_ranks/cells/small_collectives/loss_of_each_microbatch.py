# /// cell
# cause = "small_collectives"
# because = "in each of 64 micro-batches of a step the loss is reduced over the ranks and read by a blocking .item()"
# cohort = "2026-11-25a"
# written_ms = 0
# without_ms = 0
#
# [[without]]
# old = "            dist.all_reduce(shown)\n"
# new = ""
# ///
"""Small micro-batches, accumulated; the running loss of all ranks is shown in the progress line."""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MICROBATCHES = 64

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(rank)
x = torch.randn(16_384, 32, generator=generator)
y = x.square().mean(1, keepdim=True)
running = 0.0
for step in range(250):
    optimizer.zero_grad()
    for micro in range(MICROBATCHES):
        rows = torch.randint(0, len(x), (16,), generator=generator)
        last = micro == MICROBATCHES - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            (loss / MICROBATCHES).backward()
            shown = loss.detach() / world
            dist.all_reduce(shown)
            running = 0.98 * running + 0.02 * shown.item()
    optimizer.step()
    if rank == 0 and step % 25 == 0:
        sys.stdout.write(f"step {step}: running loss {running:.4f}\n")
dist.destroy_process_group()
