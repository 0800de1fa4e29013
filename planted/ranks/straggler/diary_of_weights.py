# /// cell
# cause = "straggler"
# because = "after each step rank 0 alone writes quantiles of all weights and gradients, and rank 1 waits for it"
# cohort = "2026-11-25a"
# written_ms = 142.6
# without_ms = 101.8
#
# [[without]]
# old = "DIARY_EVERY = 1 "
# new = "DIARY_EVERY = 100_000 "
# ///
"""A regression on spectra; the main process keeps a diary of the weights."""

import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DIARY_EVERY = 1  # steps


def quantiles(module: nn.Module) -> dict:
    """Of each parameter and its gradient."""
    found = {}
    for name, parameter in module.named_parameters():
        for kind, tensor in (("weight", parameter.detach()), ("gradient", parameter.grad)):
            found[f"{name}/{kind}"] = np.quantile(tensor.numpy(), np.linspace(0, 1, 21)).tolist()
    return found


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
net = nn.Sequential(
    nn.Linear(400, 768), nn.GELU(), nn.Linear(768, 512), nn.GELU(), nn.Linear(512, 3),
)  # fmt: skip
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(rank)
spectra = torch.randn(8192, 400, generator=generator)
targets = spectra[:, :3].sin()
diary = Path("diary.jsonl")
for step in range(120):
    rows = torch.randint(0, len(spectra), (640,), generator=generator)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(spectra[rows]), targets[rows])
    loss.backward()
    optimizer.step()
    if rank == 0 and step % DIARY_EVERY == 0:
        with diary.open("a") as lines:
            lines.write(json.dumps({"step": step, "loss": loss.item(), **quantiles(net)}) + "\n")
dist.destroy_process_group()
