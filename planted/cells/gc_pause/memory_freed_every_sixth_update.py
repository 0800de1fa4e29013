# /// cell
# causes = ["gc_pause"]
# because = "gc.collect() walks over a hundred thousand objects after every sixth update"
# batch = 64
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "            free_memory()\n"
# new = "            pass\n"
# ///
"""A policy learns from old games, and a helper from a forum frees memory after every sixth update."""

import gc
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import nn

torch.manual_seed(2)


@dataclass
class Move:
    number: int
    board: list = field(default_factory=list)
    comment: dict = field(default_factory=dict)


class Archive:
    """The games as they were played, to be looked at; what is learnt from lies in tensors beside."""

    def __init__(self, games=60, moves=60):
        self.games = deque([Move(m, [g, m, g + m], {"clock": [m, m + 1]}) for m in range(moves)] for g in range(games))
        count = games * moves
        self.boards = torch.randn(count, 4, 9, 9)
        self.played = torch.randint(0, 81, (count,))
        self.won = torch.randint(0, 2, (count,)).float() * 2 - 1

    def batch(self, size):
        chosen = torch.randint(len(self.boards), (size,))
        return self.boards[chosen], self.played[chosen], self.won[chosen]


class PolicyAndValue(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()
        )
        self.policy, self.value = nn.Conv2d(width, 1, 1), nn.Linear(width, 1)

    def forward(self, boards):
        h = self.body(boards)
        return self.policy(h).flatten(1), torch.tanh(self.value(h.mean((2, 3)))).squeeze(1)


def free_memory():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()


class Learner:
    def __init__(self, archive):
        self.archive, self.updates = archive, 0
        self.net = PolicyAndValue()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=0.9)

    def update(self):
        boards, played, won = self.archive.batch(64)
        logits, value = self.net(boards)
        loss = nn.functional.cross_entropy(logits, played) + nn.functional.mse_loss(value, won)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.updates += 1
        if self.updates % 6 == 0:
            free_memory()


# %% the training cell
learner = Learner(Archive())
for update in range(150):
    learner.update()
