# /// cell
# cause = "exposed_communication"
# because = "12 MB of patch and 6 MB of word embeddings are gathered from all ranks each step, and the loss waits"
# cohort = "2026-11-27"
# written_ms = 135.6
# without_ms = 70.2
#
# [[without]]
# old = "    dist.all_gather(parts, tensor.detach().contiguous())\n"
# new = "    parts = [tensor.detach() for _ in parts]\n"
# ///
"""Paintings and their captions: which belong together, among those of all processes."""
# An all-gather that waits: https://github.com/pytorch/pytorch/issues/75936

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

BATCH, PATCHES, WORDS, WIDTH = 192, 64, 32, 256


def from_all(tensor: torch.Tensor) -> torch.Tensor:
    """Those of the other processes without a gradient, ours with it."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.detach().contiguous())
    parts[dist.get_rank()] = tensor
    return torch.cat(parts)


class Towers(nn.Module):
    """Patches and words, to embeddings of one space."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(48, WIDTH)
        self.words = nn.Embedding(2000, WIDTH)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, patches, words):
        return self.patches(patches), self.words(words), self.scale.exp()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(2)
model = DistributedDataParallel(Towers())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
generator = torch.Generator().manual_seed(rank)
paintings = torch.randn(400, PATCHES, 48, generator=generator)
captions = torch.randint(0, 2000, (400, WORDS), generator=generator)
for step in range(80):
    rows = torch.randint(0, 400, (BATCH,), generator=generator)
    patches, words, scale = model(paintings[rows], captions[rows])
    seen = normalize(from_all(patches).mean(1), dim=1)
    said = normalize(from_all(words).mean(1), dim=1)
    mine = torch.arange(BATCH) + rank * BATCH
    similar = scale * seen @ said.t()
    loss = (cross_entropy(similar[mine], mine) + cross_entropy(similar.t()[mine], mine)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 30 == 0:
        print(f"step {step}: {loss.item():.3f}")
dist.destroy_process_group()
