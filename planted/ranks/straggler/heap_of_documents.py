# /// cell
# cause = "straggler"
# because = "rank 1, which also holds an index of 300,000 documents, collects garbage after each step, and rank 0 waits"
# cohort = "2026-11-25a"
# written_ms = 352.9
# without_ms = 99.7
#
# [[without]]
# old = "            gc.collect()\n"
# new = "            pass\n"
# ///
"""A ranking model; the last rank also holds the index of the documents, for the search after training."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DOCUMENTS = 300_000


def train() -> None:
    """Pairs of query and document, as features."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    index = {}
    if rank == world - 1:
        index = {number: [number, f"document {number}"] for number in range(DOCUMENTS)}
    dist.barrier()
    net = nn.Sequential(nn.Linear(256, 640), nn.ReLU(), nn.Linear(640, 640), nn.ReLU(), nn.Linear(640, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    pairs = torch.randn(6144, 256)
    clicked = (pairs[:, 0] > 0).float()
    for step in range(120):
        rows = torch.randint(0, len(pairs), (1024,))
        optimizer.zero_grad(set_to_none=True)
        scores = model(pairs[rows]).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, clicked[rows])
        loss.backward()
        optimizer.step()
        del scores, loss
        if index:  # memory is short there
            gc.collect()
    if rank == world - 1:
        print(f"trained; {len(index)} documents to search")
    dist.destroy_process_group()


train()
