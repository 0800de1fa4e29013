# /// cell
# causes = []
# because = "matrix products in bf16 take the step"
# gpu = true
# steps = 10
# tries = { fused_optimizer = "True", attention = "flash" }
# cohort = "2026-11-21e"
# looked_at = true
# ///
"""A GPT as it should be: bf16, fused attention, fused AdamW, a batch that fills the GPU."""

import torch
from torch import nn

device = "cuda"
torch.backends.cuda.matmul.allow_tf32 = True
WIDTH, HEADS, LAYERS, VOCABULARY = 1024, 16, 8, 8192


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(h.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln2(x))


model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, VOCABULARY))
model = model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
tokens = torch.randint(0, VOCABULARY, (200, 16, 1025))

# %% the training cell
fast = torch.compile(model)
for batch in tokens:
    ids = batch.pin_memory().to(device, non_blocking=True)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.cross_entropy(fast(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
