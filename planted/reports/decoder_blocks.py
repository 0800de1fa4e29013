# /// cell
# because = "healthy"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
D, HEADS, LENGTH, VOCAB = 192, 6, 128, 400


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (u.view(b, t, HEADS, -1).transpose(1, 2) for u in self.qkv(self.n1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, D))
        return x + self.mlp(self.n2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, D), nn.Parameter(torch.zeros(LENGTH, D))
        self.blocks = nn.Sequential(*[Block() for _ in range(2)])
        self.norm, self.out = nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, ids):
        return self.out(self.norm(self.blocks(self.emb(ids) + self.pos)))


tokens = torch.randint(0, VOCAB, (100_000,))
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
# %% the training cell
for it in range(40):
    starts = torch.randint(len(tokens) - LENGTH - 1, (4, 1))
    window = tokens[starts + torch.arange(LENGTH + 1)]
    logits = model(window[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 10 == 0:
        print(it, loss.item())
