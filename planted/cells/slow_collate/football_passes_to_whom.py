# /// cell
# causes = ["slow_collate"]
# because = "what lies between any two players is worked out pair by pair in Python for each batch"
# batch = 48
# steps = 40
# cohort = "2026-11-22b"
# looked_at = true
#
# [[cure]]
# old = '''
#     between = []
#     for moment in moments:
#         rows = []
#         for (x, y), (u, v), side in zip(moment["at"], moment["speed"], SIDES, strict=True):
#             row = []
#             for (to_x, to_y), (to_u, to_v), to_side in zip(moment["at"], moment["speed"], SIDES, strict=True):
#                 away = math.hypot(to_x - x, to_y - y)
#                 parting = ((to_u - u) * (to_x - x) + (to_v - v) * (to_y - y)) / (away + 1.0)
#                 row.append([away / 10, parting, float(side == to_side)])
#             rows.append(row)
#         between.append(rows)
#     between = torch.tensor(between)
#     owner = F.one_hot(torch.tensor([moment["owner"] for moment in moments]), PLAYERS)
#     side = torch.tensor(SIDES).expand(len(moments), -1)
# '''
# new = '''
#     side = torch.tensor(SIDES).expand(len(moments), -1)
#     way, change = (known[:, None] - known[:, :, None] for known in (at, speed))
#     away = way.norm(dim=-1)
#     parting = (way * change).sum(dim=-1) / (away + 1.0)
#     between = torch.stack([away / 10, parting, (side[:, None] == side[:, :, None]).float()], dim=-1)
#     owner = F.one_hot(torch.tensor([moment["owner"] for moment in moments]), PLAYERS)
# '''
# ///
"""Which player gets the pass: attention among the 22 on the pitch, led by what lies between any two."""

import math
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(10)
random.seed(10)
PLAYERS = 22
SIDES = [0] * 11 + [1] * 11


def tracked_moment():
    """As the tracking feed has it: metres, metres per second, who has the ball and who gets it."""
    owner = random.randrange(PLAYERS)
    mates = [p for p in range(PLAYERS) if SIDES[p] == SIDES[owner] and p != owner]
    return {
        "at": [(random.uniform(0, 105), random.uniform(0, 68)) for _ in range(PLAYERS)],
        "speed": [(random.gauss(0, 3), random.gauss(0, 3)) for _ in range(PLAYERS)],
        "owner": owner,
        "receiver": random.choice(mates),
    }


def put_together(moments):
    at = torch.tensor([moment["at"] for moment in moments])
    speed = torch.tensor([moment["speed"] for moment in moments])
    between = []
    for moment in moments:
        rows = []
        for (x, y), (u, v), side in zip(moment["at"], moment["speed"], SIDES, strict=True):
            row = []
            for (to_x, to_y), (to_u, to_v), to_side in zip(moment["at"], moment["speed"], SIDES, strict=True):
                away = math.hypot(to_x - x, to_y - y)
                parting = ((to_u - u) * (to_x - x) + (to_v - v) * (to_y - y)) / (away + 1.0)
                row.append([away / 10, parting, float(side == to_side)])
            rows.append(row)
        between.append(rows)
    between = torch.tensor(between)
    owner = F.one_hot(torch.tensor([moment["owner"] for moment in moments]), PLAYERS)
    side = torch.tensor(SIDES).expand(len(moments), -1)
    players = torch.cat([at / 50, speed / 3, torch.stack([owner, side], dim=-1)], dim=-1)
    return players, between, torch.tensor([moment["receiver"] for moment in moments])


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x, bias):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        heard = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.out(heard.transpose(1, 2).flatten(2))
        return x + self.think(x)


class Receiver(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.player = nn.Linear(6, width)
        self.pair = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, heads))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.score = nn.Linear(width, 1)

    def forward(self, players, between):
        x, bias = self.player(players), self.pair(between).permute(0, 3, 1, 2)
        for block in self.blocks:
            x = block(x, bias)
        return self.score(x).squeeze(-1)


season = [tracked_moment() for _ in range(1920)]

# %% the training cell
receiver = Receiver()
optimizer = torch.optim.AdamW(receiver.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
matches = DataLoader(season, batch_size=48, shuffle=True, collate_fn=put_together)
for matchday in range(6):
    for players, between, target in matches:
        loss = F.cross_entropy(receiver(players, between), target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    print("matchday", matchday, "loss", round(loss.item(), 3))
