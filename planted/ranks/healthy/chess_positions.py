# /// cell
# cause = "healthy"
# because = "positions of games of one length in both ranks at each step; 1.4 MB of gradients behind much compute"
# cohort = "2026-11-27"
# written_ms = 0.0
# without_ms = 0.0
# clock = "exchange alone"
#
# [[without]]
# old = "    model = DistributedDataParallel(Players())\n"
# new = "    model = DistributedDataParallel(Players())\n    model.require_backward_grad_sync = False\n"
# ///
"""Who wins, from the moves so far. Games differ in length; both processes draw theirs from the same bucket."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MOVES, WIDTH = 1968, 80


class Players(nn.Module):
    """Attention over the moves."""

    def __init__(self) -> None:
        super().__init__()
        self.moves = nn.Embedding(MOVES, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 240, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.winner = nn.Linear(WIDTH, 3)

    def forward(self, game):
        return self.winner(self.encoder(self.moves(game)).mean(1))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(64)
    model = DistributedDataParallel(Players())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    same = torch.Generator().manual_seed(1)
    mine = torch.Generator().manual_seed(100 + rank)
    buckets = {length: torch.randint(0, MOVES, (300, length), generator=mine) for length in (60, 80, 100, 120)}
    winners = {length: torch.randint(0, 3, (300,), generator=mine) for length in buckets}
    for step in range(70):
        length = list(buckets)[torch.randint(0, 4, (), generator=same)]
        rows = torch.randint(0, 300, (24,), generator=mine)
        loss = nn.functional.cross_entropy(model(buckets[length][rows]), winners[length][rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0 and rank == 0:
            print(f"step {step}: {loss.item():.3f}")
    dist.destroy_process_group()


main()
