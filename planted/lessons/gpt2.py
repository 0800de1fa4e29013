# /// cell
# lesson = "08"
# because = "a GPT-2 of 124 million weights in 32 bits, as a first version"
# steps = 30
# traced = 2
# limit_s = 90
# small = { WIDTH = "32", HEADS = "2", BLOCKS = "2", VOCABULARY = "64", BATCH = "2", TOKENS = "16" }
# on_cpu = [["model = torch.compile(model)\n", ""]]
#
# [[recording]]
# name = "gpt2-fp32"
# causes = ["no_tf32"]
# also = ["no_mixed_precision"]
#
# [[recording]]
# name = "gpt2-tf32"
# like = "gpt2-fp32"
# because = "and matrix products in TF32"
# edits = [['precision("highest")', 'precision("high")']]
#
# [[recording]]
# name = "gpt2-bf16"
# like = "gpt2-tf32"
# because = "and mixed precision with bf16"
# edits = [["    loss = loss_of(model, x, y)\n", '''
#     with torch.autocast(device, torch.bfloat16):
#         loss = loss_of(model, x, y)
# ''']]
#
# [[recording]]
# name = "gpt2-compile"
# like = "gpt2-bf16"
# because = "and compiled"
# edits = [["# %% the training cell\n", "# %% the training cell\nmodel = torch.compile(model)\n"]]
#
# [[recording]]
# name = "gpt2-flash"
# like = "gpt2-compile"
# because = "and attention in one kernel"
# edits = [
#     ['''
#         scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
#         h = torch.softmax(scores.masked_fill(later, float("-inf")), -1) @ v
# ''', "        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)\n"],
#     ["import math\n\n", ""],
#     ["later = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device).triu(1)\n", ""],
# ]
#
# [[recording]]
# name = "gpt2-fused"
# like = "gpt2-flash"
# because = "and AdamW in one pass"
# edits = [["foreach=True", "fused=True"]]
# ///
"""A GPT-2 from random weights; each rung of the ladder adds one change to the one before."""

import math

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 768
HEADS = 12
BLOCKS = 12
VOCABULARY = 50304
BATCH = 8
TOKENS = 1024
torch.set_float32_matmul_precision("highest")
later = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device).triu(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        h = torch.softmax(scores.masked_fill(later, float("-inf")), -1) @ v
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(BLOCKS))), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


torch.manual_seed(0)
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), foreach=True)
text = torch.randint(0, VOCABULARY, (64, BATCH, TOKENS + 1))

# %% the training cell
for step in range(400):
    tokens = text[step % 64].to(device)
    x, y = tokens[:, :-1], tokens[:, 1:]
    loss = loss_of(model, x, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
