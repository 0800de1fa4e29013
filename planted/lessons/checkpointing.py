# /// cell
# lesson = "06"
# because = "every block keeps what its backward pass needs"
# steps = 40
# small = { WIDTH = "128", BLOCKS = "2", BATCH = "2", TOKENS = "16" }
#
# [[recording]]
# name = "checkpointing-off"
#
# [[recording]]
# name = "checkpointing-on"
# because = "each block is computed a second time for its backward pass, and keeps only its input"
# edits = [
#     ["from torch import nn\n", "from torch import nn\nfrom torch.utils.checkpoint import checkpoint\n"],
#     ["            h = block(h)", "            h = checkpoint(block, h, use_reentrant=False)"],
# ]
# ///
"""A deep transformer in bf16."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 1024
BLOCKS = 12
BATCH = 16
TOKENS = 1024


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (WIDTH // 64, 64)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


torch.manual_seed(0)
blocks = nn.ModuleList(Block() for _ in range(BLOCKS)).to(device)
optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-4, fused=True)
x = torch.randn(BATCH, TOKENS, WIDTH, device=device)

# %% the training cell
for _ in range(400):
    with torch.autocast(device, torch.bfloat16):
        h = x
        for block in blocks:
            h = block(h)
        loss = h.square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
