# /// cell
# cause = "straggler"
# because = "every fourth step rank 0 alone makes up names letter by letter to show them, and rank 1 waits"
# cohort = "2026-11-27"
# written_ms = 123.1
# without_ms = 71.6
#
# [[without]]
# old = "SHOW_EVERY = 4"
# new = "SHOW_EVERY = 10_000"
# ///
"""Names of places that do not exist."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LETTERS = ".abcdefghijklmnopqrstuvwxyz"
LENGTH = 20
SHOW_EVERY = 4  # steps
SHOWN = 24


def made_names(count: int, seed: int) -> torch.Tensor:
    """Syllables in a row, filled up with dots."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        name = "".join(rng.choice("bdfghklmnrst") + rng.choice("aeiou") for _ in range(rng.randint(2, 8)))
        name = f".{name}{rng.choice(['ton', 'ham', 'by', 'wick'])}".ljust(LENGTH + 1, ".")[: LENGTH + 1]
        rows.append([LETTERS.index(letter) for letter in name])
    return torch.tensor(rows)


class Names(nn.Module):
    """Two recurrent layers over letters."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), 48)
        self.memory = nn.GRU(48, 160, num_layers=2, batch_first=True)
        self.next = nn.Linear(160, len(LETTERS))

    def forward(self, names, state=None):
        out, state = self.memory(self.letters(names), state)
        return self.next(out), state


@torch.no_grad()
def invent(net: nn.Module) -> str:
    """One name."""
    letter, state, name = torch.zeros(1, 1, dtype=torch.long), None, ""
    for _ in range(LENGTH):
        logits, state = net(letter, state)
        letter = torch.multinomial(logits[:, -1].softmax(-1), 1)
        name += LETTERS[letter.item()]
    return name.strip(".")


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(9)
net = Names()
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
names = made_names(4500, rank)
for step, rows in enumerate(torch.randperm(4500).split(50)):
    logits, _ = model(names[rows, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), names[rows, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % SHOW_EVERY == 0:
        print(f"{step:4} {loss.item():.3f}", " ".join(invent(net) for _ in range(SHOWN)))
dist.destroy_process_group()
