# /// cell
# causes = []
# because = "gradients of three rounds of 12 long sequences are gathered, each of which fills the matrix products"
# batch = 36
# rounds = 3
# steps = 4
# warmup = 1
# profiled = 30
# tries = { fused_optimizer = "True" }
# cohort = "2026-11-23"
# ///
# continuing sonnets: decoder-only transformer, rotary-free, pre-norm.   effective batch 36 = 3 x 12 (RAM!)

import torch
import torch.nn as nn
import torch.nn.functional as F

ctx = 64
dim = 192
heads = 4
vocab = 512
accumulate = 3
micro = 12

torch.manual_seed(154)
# stand-in for the tokenised corpus: a noisy second order Markov chain
table = torch.randint(0, vocab, (vocab,))
corpus = torch.empty(60_000, dtype=torch.long)
corpus[0] = 1
noise = torch.rand(60_000)
jump = torch.randint(0, vocab, (60_000,))
for i in range(1, 60_000):
    corpus[i] = table[corpus[i - 1]] if noise[i] < 0.8 else jump[i]


class DecoderBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.o = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, dim))
        return x + self.down(F.relu(self.up(self.n2(x))))


class Poet(nn.Module):
    def __init__(self, n_blocks=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(0.01 * torch.randn(ctx, dim))
        self.blocks = nn.ModuleList(DecoderBlock() for _ in range(n_blocks))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def micro_batch():
    at = torch.randint(0, len(corpus) - ctx - 1, (micro, 1)) + torch.arange(ctx + 1)
    ids = corpus[at]
    return ids[:, :-1], ids[:, 1:]


# %% the training cell
poet = Poet()
adamw = torch.optim.AdamW(poet.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
for update in range(40):
    nll = torch.zeros(())
    for _ in range(accumulate):
        seen, coming = micro_batch()
        loss = F.cross_entropy(poet(seen).flatten(0, 1), coming.flatten()) / accumulate
        loss.backward()
        nll += loss.detach()
    adamw.step()
    adamw.zero_grad(set_to_none=True)
    if update % 10 == 0:
        print(f"{update:3d}  {nll:.3f}")
