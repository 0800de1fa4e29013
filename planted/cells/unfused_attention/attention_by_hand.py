# /// cell
# causes = ["unfused_attention"]
# because = "1024 by 1024 weights of each head go through memory five times"
# steps = 12
# warmup = 3
# profiled = 30
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = '''
#         scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
#         mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), diagonal=1)
#         scores = scores.masked_fill(mask, float("-inf"))
#         h = torch.softmax(scores, dim=-1) @ v
# '''
# new = '''
#         h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
# '''
# ///
"""A small transformer over long sequences, with the attention written out as in the paper."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Attention(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), diagonal=1)
        scores = scores.masked_fill(mask, float("-inf"))
        h = torch.softmax(scores, dim=-1) @ v
        return self.out(h.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.attention = Attention(width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


model = nn.Sequential(nn.Linear(8, 64), Block(), Block(), nn.Linear(64, 8))
signal = torch.randn(64, 1024, 8).cumsum(1)
series = TensorDataset(signal[:, :-1], signal[:, 1:])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

# %% the training cell
for epoch in range(4):
    for past, following in DataLoader(series, batch_size=1, shuffle=True):
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(past), following)
        loss.backward()
        optimizer.step()
