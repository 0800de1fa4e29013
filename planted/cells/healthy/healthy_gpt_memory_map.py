# /// cell
# causes = []
# because = "matrix products take the step; a batch is read in a moment"
# batch = 8
# steps = 10
# warmup = 3
# tries = { attention = "flash" }
# cohort = "2026-11-21a"
# looked_at = true
# ///
"""A GPT as in nanoGPT: tokens from a memory map, no DataLoader."""

import numpy as np
import torch
from torch import nn

VOCABULARY, LENGTH, WIDTH = 64, 128, 192
np.random.default_rng(0).integers(0, VOCABULARY, 200_000).astype(np.uint16).tofile("train.bin")


def get_batch(size=8):
    data = np.memmap("train.bin", dtype=np.uint16, mode="r")
    at = torch.randint(len(data) - LENGTH - 1, (size,))
    x = torch.stack([torch.from_numpy(data[i : i + LENGTH].astype(np.int64)) for i in at])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in at])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (6, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(h.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.ln2(x))))


torch.manual_seed(0)
embed, blocks, head = nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(Block(), Block()), nn.Linear(WIDTH, VOCABULARY)
model = nn.ModuleList([embed, blocks, head])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

# %% the training cell
for step in range(200):
    x, y = get_batch()
    logits = head(blocks(embed(x)))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
