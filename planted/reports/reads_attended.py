# /// cell
# cohort = "second"
# because = "nn.MultiheadAttention is called with its default need_weights=True though the weights are thrown away, so that the whole attention matrix of each layer is computed and averaged instead of the fused kernel being used."
# thread = "https://github.com/lyuwenyu/RT-DETR/issues/678"
# line = "a, _ = self.attend(h, h, h)"
# callee = "torch.nn.MultiheadAttention.forward"
# faster = 1.79
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.attend = nn.MultiheadAttention(d, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x):
        h = self.n1(x)
        a, _ = self.attend(h, h, h)
        x = x + a
        return x + self.mlp(self.n2(x))


class Promoter(nn.Module):
    def __init__(self, d=64, length=384):
        super().__init__()
        self.bases = nn.Embedding(4, d)
        self.place = nn.Parameter(torch.randn(length, d) * 0.02)
        self.layers = nn.ModuleList([Layer(d, 8) for _ in range(2)])
        self.out = nn.Linear(d, 2)

    def forward(self, reads):
        x = self.bases(reads) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mean(1))


reads = torch.randint(4, (400, 384))
labels = (reads[:, 200:260] == 2).sum(1).gt(15).long()
model = Promoter()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
# %% the training cell
for step in range(50):
    rows = torch.randint(400, (4,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(reads[rows]), labels[rows])
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, round(loss.item(), 4))
print("last", loss.item())
