# /// cell
# cohort = "second"
# because = "The relative position keys are materialised for every pair of entities (batch x n x n x d) before the product with the queries; multiplying the queries with the small table and gathering the scalars gives the same logits."
# thread = "https://github.com/entity-neural-network/incubator/issues/143"
# line = "rel = torch.einsum(\"bhid,bijd->bhij\", q, self.rel_key(index))"
# callee = "torch.nn.Embedding.forward"
# faster = 2.46
# ///
import torch
import torch.nn as nn

torch.manual_seed(17)
SIDE, N, REACH = 16, 64, 5


class EntityAttention(nn.Module):
    def __init__(self, d=64, heads=2):
        super().__init__()
        self.heads, self.dh = heads, d // heads
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.rel_key = nn.Embedding((2 * REACH + 1) ** 2, self.dh)

    def forward(self, x, index):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, self.dh).permute(2, 0, 3, 1, 4).unbind(0)
        rel = torch.einsum("bhid,bijd->bhij", q, self.rel_key(index))
        att = ((q @ k.transpose(-1, -2) + rel) * self.dh ** -0.5).softmax(-1)
        return self.proj((att @ v).transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.att = EntityAttention(d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x, index):
        x = x + self.att(self.n1(x), index)
        return x + self.mlp(self.n2(x))


class Net(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.kind = nn.Embedding(6, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(2))
        self.head = nn.Linear(d, 1)

    def forward(self, kind, pos):
        delta = (pos[:, :, None] - pos[:, None]).clamp(-REACH, REACH) + REACH
        index = delta[..., 0] * (2 * REACH + 1) + delta[..., 1]
        x = self.kind(kind)
        for block in self.blocks:
            x = block(x, index)
        return self.head(x).squeeze(-1)


kinds, positions = torch.randint(0, 6, (1500, N)), torch.randint(0, SIDE, (1500, N, 2))
near = (positions[:, :, None] - positions[:, None]).abs().amax(-1) <= 1
threatened = (near & (kinds == 5)[:, None]).any(-1).float()
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
# %% the training cell
for step in range(120):
    i = torch.randint(0, 1500, (16,))
    logits = net(kinds[i], positions[i])
    loss = nn.functional.binary_cross_entropy_with_logits(logits, threatened[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, round(loss.item(), 4))
