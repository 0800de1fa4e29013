# /// cell
# causes = ["cpu_preprocessing"]
# because = "the planes of a board are found in Python, point by point, each time it is played"
# framework = "lightning"
# batch = 64
# steps = 32
# warmup = 16
# cohort = "2026-11-22b"
#
# [[cure]]
# old = "self.boards = boards\n"
# new = "self.planes = [features(board) for board in boards]\n"
#
# [[cure]]
# old = "planes = features(self.boards[index])"
# new = "planes = self.planes[index]"
# ///
"""The next move of a game of Go in Lightning, from boards as text turned to planes of stones and liberties."""

import random

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

L.seed_everything(19, verbose=False)
LINES = 19
POINTS = LINES * LINES
NEAR = [
    [
        (row + down) * LINES + column + right
        for down, right in ((-1, 0), (0, -1), (0, 1), (1, 0))
        if 0 <= row + down < LINES and 0 <= column + right < LINES
    ]
    for row in range(LINES)
    for column in range(LINES)
]


def liberties(board):
    """For each stone, how many free points its chain touches."""
    found, seen = [0] * POINTS, set()
    for point, stone in enumerate(board):
        if stone == "." or point in seen:
            continue
        chain, free, border = [], set(), [point]
        seen.add(point)
        while border:
            here = border.pop()
            chain.append(here)
            for near in NEAR[here]:
                if board[near] == ".":
                    free.add(near)
                elif board[near] == stone and near not in seen:
                    seen.add(near)
                    border.append(near)
        for here in chain:
            found[here] = len(free)
    return found


def features(board):
    counts = liberties(board)
    planes = [[0.0] * POINTS for _ in range(8)]
    for point, stone in enumerate(board):
        planes[".xo".index(stone)][point] = 1.0
        if stone != ".":
            planes[2 + min(max(counts[point], 1), 4)][point] = 1.0
        elif len({board[near] for near in NEAR[point]}) == 1:
            planes[7][point] = 1.0
    return torch.tensor(planes).view(8, LINES, LINES)


class Games(Dataset):
    """Positions with the move that was played; a board looks the same from each of its four sides."""

    def __init__(self, boards, moves):
        self.boards = boards
        self.moves = moves

    def __len__(self):
        return len(self.moves)

    def __getitem__(self, index):
        planes = features(self.boards[index])
        played = torch.zeros(POINTS)
        played[self.moves[index]] = 1.0
        side = random.randrange(4)
        return planes.rot90(side, (1, 2)), played.view(LINES, LINES).rot90(side).flatten()


class Policy(L.LightningModule):
    def __init__(self, width=24):
        super().__init__()
        self.first = nn.Conv2d(8, width, 5, padding=2)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, planes):
        return self.last(F.relu(self.second(F.relu(self.first(planes))))).flatten(1)

    def training_step(self, batch, batch_idx):
        planes, played = batch
        return F.cross_entropy(self(planes), played)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)


boards = ["".join(random.choices(".xo", (4, 3, 3), k=POINTS)) for _ in range(1024)]
moves = [random.choice([p for p in range(POINTS) if board[p] == "."]) for board in boards]
masters = Games(boards, moves)

# %% the training cell
policy = Policy()
trainer = L.Trainer(
    accelerator="cpu",
    max_epochs=15,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(policy, train_dataloaders=DataLoader(masters, batch_size=64, shuffle=True))
