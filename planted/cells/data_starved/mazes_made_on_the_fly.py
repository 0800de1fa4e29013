# /// cell
# causes = ["data_starved"]
# because = "eight mazes are dug and measured in Python between one step and the next"
# also = ["cpu_preprocessing"]
# batch = 8
# warmup = 8
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "DataLoader(Mazes(seed=0, count=2400), batch_size=8)"
# new = "DataLoader(list(Mazes(seed=0, count=240)) * 10, batch_size=8)"
# ///
"""A network learns how far each cell of a maze is from its exit; a generator digs the mazes while training goes on."""

import random
from collections import deque

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

torch.manual_seed(0)
SIDE = 31


def dig(rng):
    """Depth first, from one corner, two cells at a time."""
    wall = [[1] * SIDE for _ in range(SIDE)]
    wall[1][1] = 0
    path = [(1, 1)]
    while path:
        y, x = path[-1]
        ways = []
        for dy, dx in ((0, 2), (2, 0), (0, -2), (-2, 0)):
            if 0 < y + dy < SIDE and 0 < x + dx < SIDE and wall[y + dy][x + dx]:
                ways.append((dy, dx))
        if not ways:
            path.pop()
            continue
        dy, dx = rng.choice(ways)
        wall[y + dy // 2][x + dx // 2] = wall[y + dy][x + dx] = 0
        path.append((y + dy, x + dx))
    return wall


def distances(wall, goal):
    away = [[0] * SIDE for _ in range(SIDE)]
    seen, queue = {goal}, deque([goal])
    while queue:
        y, x = queue.popleft()
        for cell in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
            if cell not in seen and not wall[cell[0]][cell[1]]:
                seen.add(cell)
                away[cell[0]][cell[1]] = away[y][x] + 1
                queue.append(cell)
    return away


class Mazes(IterableDataset):
    def __init__(self, seed, count):
        self.seed, self.count = seed, count

    def __iter__(self):
        rng = random.Random(self.seed)
        for _ in range(self.count):
            wall = dig(rng)
            away = distances(wall, (SIDE - 2, SIDE - 2))
            yield torch.tensor(wall, dtype=torch.float32).unsqueeze(0), torch.tensor(away, dtype=torch.float32) / 100


class Planner(nn.Module):
    """The same convolution again and again, as if it iterated values."""

    def __init__(self, width=16, rounds=5):
        super().__init__()
        self.enter, self.step = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.leave, self.rounds = nn.Conv2d(width, 1, 1), rounds

    def forward(self, maze):
        h = self.enter(maze)
        for _ in range(self.rounds):
            h = torch.relu(self.step(h))
        return self.leave(h).squeeze(1)


planner = Planner()
opt = torch.optim.RMSprop(planner.parameters(), lr=1e-3)

# %% the training cell
loader = DataLoader(Mazes(seed=0, count=2400), batch_size=8)
smooth = None
for i, (maze, away) in enumerate(loader):
    opt.zero_grad(set_to_none=True)
    loss = nn.functional.smooth_l1_loss(planner(maze), away)
    loss.backward()
    opt.step()
    if i % 100 == 0:
        smooth = loss.item() if smooth is None else 0.8 * smooth + 0.2 * loss.item()
        print(i, smooth)
