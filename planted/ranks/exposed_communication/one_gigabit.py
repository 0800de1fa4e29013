# /// cell
# cause = "exposed_communication"
# because = "a link of 1 Gbit/s: a communication hook lets each bucket take 8 ns per byte more"
# cohort = "2026-11-25a"
# written_ms = 161.7
# without_ms = 85.5
#
# [[without]]
# old = "BYTES_PER_S = 125e6"
# new = "BYTES_PER_S = 125e12"
# ///
"""Genotypes to traits: a wide first layer, over a link of one gigabit per second."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BYTES_PER_S = 125e6


def over_the_link(group, bucket):
    """All-reduce of the bucket as the link would do it: its bytes take their time."""
    gradients = bucket.buffer().div_(dist.get_world_size())
    seconds = gradients.numel() * gradients.element_size() / BYTES_PER_S

    def arrived(future):
        time.sleep(seconds)
        return future.value()[0]

    return dist.all_reduce(gradients, async_op=True).get_future().then(arrived)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6000, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 8))
model = DistributedDataParallel(net)
model.register_comm_hook(None, over_the_link)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
genotypes = torch.randint(0, 3, (1024, 6000), generator=torch.Generator().manual_seed(rank)).float()
traits = genotypes[:, :8] * 0.5
for epoch in range(20):
    for begin in range(0, 1024, 192):
        optimizer.zero_grad()
        predicted = model(genotypes[begin : begin + 192])
        loss = nn.functional.mse_loss(predicted, traits[begin : begin + 192])
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
