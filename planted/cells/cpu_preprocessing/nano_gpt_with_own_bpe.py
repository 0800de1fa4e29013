# /// cell
# causes = ["cpu_preprocessing"]
# because = "get_batch runs a byte-pair encoder written in Python on a dozen pieces of text for each step"
# batch = 12
# steps = 20
# cohort = "2026-11-23"
# looked_at = true
#
# [[cure]]
# old = '''
#     starts = random.choices(range(len(text) - 6 * block_size), k=batch_size)
#     rows = [encode(text[s : s + 6 * block_size])[: block_size + 1] for s in starts]
# '''
# new = '''
#     starts = random.choices(range(len(data) - block_size - 1), k=batch_size)
#     rows = [data[s : s + block_size + 1] for s in starts]
# '''
#
# [[cure]]
# old = "vocab_size = 256 + len(merges)\n"
# new = "vocab_size = 256 + len(merges)\ndata = encode(text)\n"
# ///
# a tiny GPT, after the lecture. next: train on my own diary?
import itertools
import random

import torch
import torch.nn as nn
from torch.nn import functional as F

# hyperparameters
batch_size = 12
block_size = 64
max_iters = 150
eval_interval = 100
learning_rate = 1e-3
n_embd = 64
n_head = 4
n_layer = 2
n_merges = 48
# ------------

torch.manual_seed(1337)
random.seed(1337)

nouns = ["sea", "ship", "captain", "whale", "harpoon", "sailor", "storm", "island", "deck", "mast", "wind", "lantern"]
verbs = ["sees", "hears", "follows", "fears", "strikes", "leaves", "finds", "carries", "watches", "forgets"]
text = ". ".join(f"the {random.choice(nouns)} {random.choice(verbs)} the {random.choice(nouns)}" for _ in range(900))


# --- byte pair encoding, from scratch
def get_stats(ids):
    counts = {}
    for pair in itertools.pairwise(ids):
        counts[pair] = counts.get(pair, 0) + 1
    return counts


def merge(ids, pair, idx):
    newids = []
    i = 0
    while i < len(ids):
        if i < len(ids) - 1 and ids[i] == pair[0] and ids[i + 1] == pair[1]:
            newids.append(idx)
            i += 2
        else:
            newids.append(ids[i])
            i += 1
    return newids


ids = list(text[:4000].encode("utf-8"))
merges = {}
for i in range(n_merges):
    stats = get_stats(ids)
    top = max(stats, key=stats.get)
    ids = merge(ids, top, 256 + i)
    merges[top] = 256 + i


def encode(s):
    tokens = list(s.encode("utf-8"))
    while len(tokens) >= 2:
        stats = get_stats(tokens)
        pair = min(stats, key=lambda p: merges.get(p, float("inf")))
        if pair not in merges:
            break
        tokens = merge(tokens, pair, merges[pair])
    return tokens


vocab_size = 256 + len(merges)


def get_batch():
    starts = random.choices(range(len(text) - 6 * block_size), k=batch_size)
    rows = [encode(text[s : s + 6 * block_size])[: block_size + 1] for s in starts]
    ix = torch.tensor(rows)
    return ix[:, :-1], ix[:, 1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.proj = nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.ReLU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln2(x))


class TinyGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(vocab_size, n_embd)
        self.pos = nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*[Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx, targets):
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1]))
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        return F.cross_entropy(logits.view(-1, vocab_size), targets.reshape(-1))


# %% the training cell
model = TinyGPT()
print(sum(p.numel() for p in model.parameters()) / 1e6, "M parameters")
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)

for iter in range(max_iters):
    xb, yb = get_batch()
    loss = model(xb, yb)
    if iter % eval_interval == 0:
        print(f"step {iter}: loss {loss.item():.4f}")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
