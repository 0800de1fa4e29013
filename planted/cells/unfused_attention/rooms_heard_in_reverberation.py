# /// cell
# causes = ["unfused_attention"]
# because = "scores of 512 frames with each other are scaled, masked, put through a softmax and dropped out one by one"
# batch = 2
# steps = 10
# warmup = 2
# cohort = "2026-11-23"
#
# [[cure]]
# old = "context, self.last_attention = scaled_dot_product(q, k, v, mask, self.scale)"
# new = "context = F.scaled_dot_product_attention(q, k, v, attn_mask=~mask, scale=self.scale)"
# ///
# blind room acoustics: estimate T60 in 6 bands from reverberant speech
# front end = gammatone-ish energies (done offline), back end = 2 attention layers, mean pooling

import torch
import torch.nn.functional as F
from torch import nn

FRAMES, BANDS, T60_BANDS = 512, 32, 6


def scaled_dot_product(q, k, v, mask, scale):
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
    attention = torch.softmax(scores, dim=-1)
    return torch.matmul(attention, v), attention.detach()


class SelfAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.scale = h, (d // h) ** -0.5
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d) for _ in range(4))
        self.last_attention = None  # for the figures

    def split(self, x):
        b, t, d = x.shape
        return x.view(b, t, self.h, d // self.h).transpose(1, 2)

    def forward(self, x, mask):
        q, k, v = self.split(self.wq(x)), self.split(self.wk(x)), self.split(self.wv(x))
        context, self.last_attention = scaled_dot_product(q, k, v, mask, self.scale)
        return self.wo(context.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, d=64, h=4):
        super().__init__()
        self.att, self.n1, self.n2 = SelfAttention(d, h), nn.LayerNorm(d), nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))

    def forward(self, x, mask):
        x = x + self.att(self.n1(x), mask)
        return x + self.ff(self.n2(x))


class T60Net(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.inp = nn.Linear(BANDS, d)
        self.layers = nn.ModuleList([Layer(d), Layer(d)])
        self.out = nn.Linear(d, T60_BANDS)
        # a frame may look 250 frames back (longest decay that we care about), not ahead
        i = torch.arange(FRAMES)
        lag = i[:, None] - i[None, :]
        self.register_buffer("mask", (lag < 0) | (lag > 250), persistent=False)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x, self.mask)
        return F.softplus(self.out(x.mean(1)))


def decays(n):
    t60 = 0.2 + 1.3 * torch.rand(n, T60_BANDS)
    per_band = t60.repeat_interleave(6, dim=1)[:, :BANDS]
    onset = (torch.rand(n, FRAMES, 1) < 0.03).float() * torch.rand(n, FRAMES, 1)
    energy = torch.zeros(n, FRAMES, BANDS)
    e = torch.zeros(n, BANDS)
    for f in range(FRAMES):
        e = e * torch.exp(-13.8 * 0.01 / per_band) + onset[:, f]
        energy[:, f] = e
    return torch.log1p(100 * energy) + 0.05 * torch.randn(n, FRAMES, BANDS), t60


torch.manual_seed(60)
speech, t60 = decays(160)

# %% the training cell
net = T60Net()
adam = torch.optim.Adam(net.parameters(), lr=5e-4, fused=True)
for epoch in range(2):
    for pick in torch.randperm(len(speech)).split(2):
        estimate = net(speech[pick])
        loss = (torch.log(estimate) - torch.log(t60[pick])).abs().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    print(f"{epoch=} {loss.item()=:.3f}")
