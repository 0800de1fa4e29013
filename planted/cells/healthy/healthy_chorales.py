# /// cell
# causes = []
# because = "matrix products take the step; attention over 64 notes takes a moment"
# batch = 24
# steps = 8
# warmup = 3
# tries = { workers = "2", batch_size = "48", attention = "flash" }
# cohort = "2026-11-21d"
# ///
"""The next note of a chorale from those before it: a decoder in plain PyTorch, AdamW, warm-up and cosine."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(35)
NOTES, LENGTH = 96, 64


class Chorales(Dataset):
    def __init__(self, n=480):
        steps = torch.randint(-2, 3, (n, LENGTH + 1))
        self.notes = (48 + steps.cumsum(1)).clamp(0, NOTES - 1)

    def __len__(self):
        return len(self.notes)

    def __getitem__(self, i):
        return self.notes[i, :-1], self.notes[i, 1:]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Composer(nn.Module):
    def __init__(self, width=192, heads=4, depth=2):
        super().__init__()
        self.note, self.place = nn.Embedding(NOTES, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NOTES, bias=False)

    def forward(self, notes):
        return self.head(self.norm(self.blocks(self.note(notes) + self.place)))


def rate(step, warmup=20, total=200):
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1, (step - warmup) / (total - warmup))))


# %% the training cell
composer = Composer()
groups = [
    {"params": [p for p in composer.parameters() if p.ndim > 1], "weight_decay": 0.1},
    {"params": [p for p in composer.parameters() if p.ndim < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
for epoch in range(5):
    for notes, following in DataLoader(Chorales(), batch_size=24, shuffle=True, drop_last=True):
        loss = F.cross_entropy(composer(notes).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(composer.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
