# /// cell
# causes = ["unfused_attention"]
# because = "768 by 768 weights of each head go through memory again and again"
# framework = "accelerate"
# batch = 2
# steps = 12
# warmup = 3
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = '''
#         affinity = q @ k.transpose(1, 2) / q.size(-1) ** 0.5
#         affinity = affinity.masked_fill(self.past == 0, -1e9)
#         affinity = F.softmax(affinity, dim=2)
#         return torch.bmm(affinity, v)
# '''
# new = '''
#         q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
#         return F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
# '''
# ///
"""Traffic at one crossing is forecast from its last 768 readings, one attention head after the other; Accelerate."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(10)
LENGTH = 768
day = torch.sin(torch.arange(LENGTH + 1) * 0.065) + 0.3 * torch.randn(160, LENGTH + 1)
windows = TensorDataset(day[:, :-1, None], day[:, 1:, None])


class Head(nn.Module):
    def __init__(self, width, size):
        super().__init__()
        self.query = nn.Linear(width, size, bias=False)
        self.key = nn.Linear(width, size, bias=False)
        self.value = nn.Linear(width, size, bias=False)
        self.register_buffer("past", torch.tril(torch.ones(LENGTH, LENGTH)), persistent=False)

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        affinity = q @ k.transpose(1, 2) / q.size(-1) ** 0.5
        affinity = affinity.masked_fill(self.past == 0, -1e9)
        affinity = F.softmax(affinity, dim=2)
        return torch.bmm(affinity, v)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = nn.ModuleList(Head(width, width // heads) for _ in range(heads))
        self.norm, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))

    def forward(self, x):
        x = x + torch.cat([head(x) for head in self.heads], -1)
        return x + self.mlp(self.norm(x))


class Forecaster(nn.Module):
    def __init__(self, width=48, heads=3):
        super().__init__()
        self.into, self.out = nn.Linear(1, width), nn.Linear(width, 1)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.layers = nn.Sequential(Layer(width, heads), nn.LayerNorm(width))

    def forward(self, x):
        return self.out(self.layers(self.into(x) + self.place))


# %% the training cell
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
model = Forecaster()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(windows, batch_size=2, shuffle=True))
for epoch in range(2):
    for past, following in loader:
        with accelerator.accumulate(model):
            loss = F.l1_loss(model(past), following)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(epoch, loss.item())
