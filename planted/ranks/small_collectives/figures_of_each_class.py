# /// cell
# cause = "small_collectives"
# because = "three counts of each of 64 classes are reduced and read by .item() one by one: 192 exchanges a step"
# cohort = "2026-11-25a"
# written_ms = 173.4
# without_ms = 23.4
#
# [[without]]
# old = "    for kind in range(CLASSES):\n"
# new = "    for kind in range(0):\n"
# ///
"""Signs of a script to their 64 letters, with precision and recall of each letter after each step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CLASSES = 64


def reduced(count: torch.Tensor) -> float:
    """The sum over all ranks."""
    dist.all_reduce(count)
    return count.item()


def add_figures(figures: dict, predicted: torch.Tensor, truth: torch.Tensor) -> None:
    """True positives, false positives and false negatives of each letter."""
    for kind in range(CLASSES):
        hit, said, meant = predicted == kind, predicted == kind, truth == kind
        figures["tp", kind] += reduced((hit & meant).sum())
        figures["fp", kind] += reduced((said & ~meant).sum())
        figures["fn", kind] += reduced((~said & meant).sum())


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(6)
net = nn.Sequential(
    nn.Conv2d(1, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 81, CLASSES)
)
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(rank)
signs = torch.randn(4096, 1, 24, 24, generator=generator)
letters = torch.randint(0, CLASSES, (4096,), generator=generator)
figures = {(figure, kind): 0.0 for figure in ("tp", "fp", "fn") for kind in range(CLASSES)}
for step in range(300):
    rows = torch.randint(0, 4096, (64,), generator=generator)
    optimizer.zero_grad()
    logits = model(signs[rows])
    loss = nn.functional.cross_entropy(logits, letters[rows])
    loss.backward()
    optimizer.step()
    add_figures(figures, logits.detach().argmax(1), letters[rows])
if rank == 0:
    print("recall of the first letter", figures["tp", 0] / (figures["tp", 0] + figures["fn", 0]))
dist.destroy_process_group()
