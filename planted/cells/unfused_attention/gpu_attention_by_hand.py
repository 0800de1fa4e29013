# /// cell
# causes = ["unfused_attention"]
# because = "2048 by 2048 weights of each head go through memory again and again"
# gpu = true
# batch = 8
# steps = 20
# cohort = "2026-11-21e"
# looked_at = true
#
# [[cure]]
# old = '''
#         weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1)
#         h = weights @ v
# '''
# new = '''
#         h = nn.functional.scaled_dot_product_attention(q, k, v)
# '''
# ///
"""Attention over 2048 tokens written out as in the paper, in bf16."""

import math

import torch
from torch import nn

device = "cuda"


class Attention(nn.Module):
    def __init__(self, width=512, heads=8):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1)
        h = weights @ v
        return x + self.out(h.transpose(1, 2).flatten(2))


model = nn.Sequential(*(Attention() for _ in range(6))).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
x = torch.randn(8, 2048, 512, device=device)

# %% the training cell
for step in range(200):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
