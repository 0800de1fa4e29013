# /// cell
# causes = ["unfused_attention"]
# because = "768 by 768 weights of each of four heads go through memory again and again"
# batch = 2
# steps = 20
# cohort = "2026-11-22c"
#
# [[cure]]
# old = '''
#         logits = torch.matmul(q, k.mT) / self.size**0.5
#         logits = logits + self.bias
#         attend = torch.softmax(logits.float(), dim=-1).type_as(q)
#         mixed = torch.matmul(attend, v)
# '''
# new = '''
#         mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[None])
# '''
# ///
"""A language model of server logs, byte by byte, for lines that nobody has seen before; linear biases for positions."""

import random
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

C = SimpleNamespace(context=768, dim=64, heads=4, groups=2, blocks=2, batch=2, lr=2e-3, iterations=130)
torch.manual_seed(907)
random.seed(907)


def log_lines(count):
    verbs, ways = ("GET", "POST", "PUT"), ("/login", "/cart", "/api/v2/items", "/static/app.js")
    for _ in range(count):
        host = ".".join(str(random.randrange(256)) for _ in range(4))
        code = random.choice((200, 200, 200, 304, 404, 500))
        yield f'{host} - "{random.choice(verbs)} {random.choice(ways)}" {code} {random.randrange(9000)}\n'


def slopes(heads):
    return torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)])


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = C.dim // C.heads
        self.q = nn.Linear(C.dim, C.dim, bias=False)
        self.kv = nn.Linear(C.dim, 2 * C.groups * self.size, bias=False)
        self.out = nn.Linear(C.dim, C.dim, bias=False)
        back = torch.arange(C.context)[:, None] - torch.arange(C.context)
        bias = -slopes(C.heads)[:, None, None] * back
        self.register_buffer("bias", bias.masked_fill(back < 0, float("-inf")), persistent=False)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, C.heads, self.size).transpose(1, 2)
        k, v = self.kv(x).view(b, t, 2, C.groups, self.size).permute(2, 0, 3, 1, 4)
        k = k.repeat_interleave(C.heads // C.groups, dim=1)
        v = v.repeat_interleave(C.heads // C.groups, dim=1)
        logits = torch.matmul(q, k.mT) / self.size**0.5
        logits = logits + self.bias
        attend = torch.softmax(logits.float(), dim=-1).type_as(q)
        mixed = torch.matmul(attend, v)
        return self.out(mixed.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.mix, self.norm2 = nn.LayerNorm(C.dim), Mix(), nn.LayerNorm(C.dim)
        self.mlp = nn.Sequential(nn.Linear(C.dim, 3 * C.dim), nn.GELU(), nn.Linear(3 * C.dim, C.dim))

    def forward(self, x):
        x = x + self.mix(self.norm1(x))
        return x + self.mlp(self.norm2(x))


text = torch.frombuffer(bytearray("".join(log_lines(4000)).encode()), dtype=torch.uint8).long()
model = nn.Sequential(
    nn.Embedding(128, C.dim), *(Block() for _ in range(C.blocks)), nn.LayerNorm(C.dim), nn.Linear(C.dim, 128)
)

# %% the training cell
optimizer = torch.optim.AdamW(model.parameters(), lr=C.lr, betas=(0.9, 0.95), fused=True)
warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
surprise = 0.0
for iteration in range(C.iterations):
    starts = torch.randint(0, len(text) - C.context - 1, (C.batch, 1))
    window = text[starts + torch.arange(C.context + 1)]
    loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    warm.step()
    surprise = 0.9 * surprise + 0.1 * loss.item()
print(f"{surprise / 0.6931:.2f} bits per byte")
