# /// cell
# causes = ["cpu_preprocessing"]
# because = "a generator works out the legal moves of each position in Python, for the policy's mask"
# batch = 48
# cohort = "2026-11-23"
# looked_at = true
#
# [[cure]]
# old = '''
#             planes = [as_planes(p) for p in chunk]
# '''
# new = '''
#             planes = [CACHE[p.key] for p in chunk]
# '''
#
# [[cure]]
# old = "buffer = [random_position() for _ in range(3000)]\n"
# new = "buffer = [random_position() for _ in range(3000)]\nCACHE = {p.key: as_planes(p) for p in buffer}\n"
# ///
"""othello-zero / learner.ipynb — only the supervised warm start, no MCTS yet"""

import random
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F

random.seed(64), torch.manual_seed(64)
DIRS = [(dr, dc) for dr in (-1, 0, 1) for dc in (-1, 0, 1) if (dr, dc) != (0, 0)]
ME, OPP, EMPTY = 1, -1, 0


class Position:
    __slots__ = ("board", "key", "move", "z")

    def __init__(self, board, move, z):
        self.board, self.move, self.z = board, move, z
        self.key = (tuple(map(tuple, board)), move)


def flips(board, r, c):
    """stones that a move to (r, c) would turn"""
    if board[r][c] != EMPTY:
        return 0
    total = 0
    for dr, dc in DIRS:
        i, j, run = r + dr, c + dc, 0
        while 0 <= i < 8 and 0 <= j < 8 and board[i][j] == OPP:
            run, i, j = run + 1, i + dr, j + dc
        if run and 0 <= i < 8 and 0 <= j < 8 and board[i][j] == ME:
            total += run
    return total


def as_planes(pos):
    planes = np.zeros((4, 8, 8), dtype=np.float32)
    for r in range(8):
        for c in range(8):
            s = pos.board[r][c]
            planes[0, r, c] = s == ME
            planes[1, r, c] = s == OPP
            n = flips(pos.board, r, c)
            planes[2, r, c] = n > 0
            planes[3, r, c] = n / 10
    return planes


def random_position():
    board = [[random.choice((ME, OPP, OPP, EMPTY, EMPTY)) for _ in range(8)] for _ in range(8)]
    legal = [(r, c) for r in range(8) for c in range(8) if flips(board, r, c)] or [(0, 0)]
    r, c = max(legal, key=lambda rc: flips(board, *rc))
    return Position(board, 8 * r + c, random.choice((-1.0, 1.0)))


buffer = [random_position() for _ in range(3000)]


def sample_forever(positions, n):
    while True:
        random.shuffle(positions)
        for k in range(0, len(positions) - n, n):
            chunk = positions[k : k + n]
            planes = [as_planes(p) for p in chunk]
            yield (
                torch.from_numpy(np.stack(planes)),
                torch.tensor([p.move for p in chunk]),
                torch.tensor([p.z for p in chunk]),
            )


class PV(torch.nn.Module):
    def __init__(self, ch=32):
        super().__init__()
        self.c1 = torch.nn.Conv2d(4, ch, 3, padding=1)
        self.c2 = torch.nn.Conv2d(ch, ch, 3, padding=1)
        self.pi = torch.nn.Linear(ch * 64, 64)
        self.v = torch.nn.Linear(ch * 64, 1)

    def forward(self, s):
        h = F.relu(self.c2(F.relu(self.c1(s)))).flatten(1)
        logits = self.pi(h).masked_fill(s[:, 2].flatten(1) == 0, -1e4)
        return logits, torch.tanh(self.v(h)).squeeze(1)


# %% the training cell
net = PV()
opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
recent = deque(maxlen=50)
batches = sample_forever(buffer, 48)
for step in range(180):
    s, a, z = next(batches)
    logits, v = net(s)
    loss = F.cross_entropy(logits, a) + F.mse_loss(v, z)
    opt.zero_grad()
    loss.backward()
    opt.step()
    recent.append(loss.item())
    if step % 60 == 59:
        print(step + 1, sum(recent) / len(recent))
