# /// cell
# lesson = "08"
# because = "2048 by 2048 weights of each head go through memory again and again"
# steps = 60
# small = { WIDTH = "32", TOKENS = "32", BATCH = "2" }
#
# [[recording]]
# name = "attention-four-operators"
# causes = ["unfused_attention"]
#
# [[recording]]
# name = "attention-sdpa"
# because = "one fused kernel that never writes the weights to memory"
# edits = [
#     ['''
#         scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
#         weights = torch.softmax(scores.masked_fill(later, float("-inf")), -1)
#         h = weights @ v
# ''', "        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)\n"],
#     ["import math\n\n", ""],
#     ["later = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device).triu(1)\n", ""],
# ]
# ///
"""Causal attention over 2048 tokens, in bf16."""

import math

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 512
TOKENS = 2048
BATCH = 8
later = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device).triu(1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (8, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = torch.softmax(scores.masked_fill(later, float("-inf")), -1)
        h = weights @ v
        return x + self.out(h.transpose(1, 2).flatten(2))


torch.manual_seed(0)
model = nn.Sequential(*(Attention() for _ in range(6))).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
x = torch.randn(BATCH, TOKENS, WIDTH, device=device)

# %% the training cell
for _ in range(800):
    with torch.autocast(device, torch.bfloat16):
        loss = model(x).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
