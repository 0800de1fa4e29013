# /// cell
# cause = "uneven_data"
# because = "the batch is sorted by length before it is cut in two: rank 0 has the short rulings, rank 1 the long ones"
# cohort = "2026-11-27"
# written_ms = 108.0
# without_ms = 78.2
#
# [[without]]
# old = "    return order[rank * share : (rank + 1) * share]\n"
# new = "    return order[rank::world]\n"
# ///
"""Rulings of a court, to the field of law; texts are laid end to end, so that nothing is padded."""
# As in https://github.com/lightseekorg/TorchSpec/issues/13, as many samples in each rank say little about the tokens.

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORDS, FIELDS, BATCH = 4000, 15, 32


def part(lengths: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Which samples of the batch are this rank's; alike lengths together, as the packing likes them."""
    order = lengths.argsort()
    share = len(order) // world
    return order[rank * share : (rank + 1) * share]


class Rulings(nn.Module):
    """Each word with its neighbours, then the mean of a ruling."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 96)
        self.near = nn.Conv1d(96, 192, 5, padding=2)
        self.far = nn.Conv1d(192, 192, 5, padding=4, dilation=2)
        self.field = nn.Linear(192, FIELDS)

    def forward(self, words, lengths):
        x = self.words(words).t()[None]
        x = self.far(self.near(x).relu()).relu()[0].t()
        owner = torch.arange(len(lengths)).repeat_interleave(lengths)
        total = x.new_zeros(len(lengths), x.shape[1]).index_add(0, owner, x)
        return self.field(total / lengths[:, None])


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = DistributedDataParallel(Rulings())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    same = torch.Generator().manual_seed(12)
    lengths = (torch.randn(3000, generator=same) * 0.8 + 4.4).exp().clamp(15, 700).long()
    rulings = [torch.randint(0, WORDS, (n,), generator=same) for n in lengths.tolist()]
    fields = torch.randint(0, FIELDS, (3000,), generator=same)
    for step, batch in enumerate(torch.randperm(3000, generator=same)[: 80 * BATCH].split(BATCH)):
        mine = batch[part(lengths[batch], rank, world)]
        words = torch.cat([rulings[i] for i in mine.tolist()])
        loss = nn.functional.cross_entropy(model(words, lengths[mine]), fields[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 30 == 0:
            print(f"step {step}: {loss.item():.3f}")
    dist.destroy_process_group()


main()
