# /// cell
# cause = "small_collectives"
# because = "in each of 64 micro-batches loss and error are reduced over the ranks and read by .item(), which blocks"
# cohort = "2026-11-25a"
# written_ms = 193.0
# without_ms = 76.8
#
# [[without]]
# old = "    dist.all_reduce(figure)\n"
# new = ""
# ///
"""Small micro-batches, accumulated; the running figures of all ranks are shown in the progress line."""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MICROBATCHES = 64


def over_ranks(figure: torch.Tensor) -> float:
    """The mean of the ranks."""
    figure = figure.detach() / dist.get_world_size()
    dist.all_reduce(figure)
    return figure.item()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(rank)
x = torch.randn(16_384, 32, generator=generator)
y = x.square().mean(1, keepdim=True)
running = error = 0.0
for step in range(250):
    optimizer.zero_grad()
    for micro in range(MICROBATCHES):
        rows = torch.randint(0, len(x), (16,), generator=generator)
        last = micro == MICROBATCHES - 1
        with contextlib.nullcontext() if last else model.no_sync():
            predicted = model(x[rows])
            loss = nn.functional.mse_loss(predicted, y[rows])
            (loss / MICROBATCHES).backward()
            running = 0.98 * running + 0.02 * over_ranks(loss)
            error = 0.98 * error + 0.02 * over_ranks((predicted - y[rows]).abs().mean())
    optimizer.step()
    if rank == 0 and step % 25 == 0:
        sys.stdout.write(f"step {step}: loss {running:.4f}, error {error:.4f}\n")
dist.destroy_process_group()
