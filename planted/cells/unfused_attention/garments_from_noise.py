# /// cell
# causes = ["unfused_attention"]
# because = "784 by 784 weights of each picture go through memory again and again"
# batch = 4
# steps = 12
# warmup = 3
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = '''
#         w_ = torch.bmm(q.permute(0, 2, 1), k)
#         w_ = w_ * (int(c) ** (-0.5))
#         w_ = torch.exp(w_ - w_.amax(dim=2, keepdim=True))
#         w_ = w_ / w_.sum(dim=2, keepdim=True)
#         h_ = torch.bmm(v, w_.permute(0, 2, 1))
# '''
# new = '''
#         q, k, v = (t.permute(0, 2, 1).unsqueeze(1) for t in (q, k, v))
#         h_ = F.scaled_dot_product_attention(q, k, v).squeeze(1).permute(0, 2, 1)
# '''
# ///
"""A denoiser for pictures of garments that looks from each pixel at all others, as in the first diffusion networks."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(30)
STEPS, SIDE = 200, 28
axis = torch.linspace(-1, 1, SIDE)
radius = (axis[:, None] ** 2 + axis[None, :] ** 2).sqrt()
pictures = torch.tanh(4 * (torch.rand(256, 1, 1, 1) + 0.2 - radius)) + 0.05 * torch.randn(256, 1, SIDE, SIDE)
left = torch.cos(torch.linspace(0, 1, STEPS) * math.pi / 2) ** 2  # of the picture, at each level of noise


class AttnBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3 * c, h * w).chunk(3, dim=1)
        w_ = torch.bmm(q.permute(0, 2, 1), k)
        w_ = w_ * (int(c) ** (-0.5))
        w_ = torch.exp(w_ - w_.amax(dim=2, keepdim=True))
        w_ = w_ / w_.sum(dim=2, keepdim=True)
        h_ = torch.bmm(v, w_.permute(0, 2, 1))
        return x + self.proj_out(h_.reshape(b, c, h, w))


class Denoiser(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.level = nn.Embedding(STEPS, channels)
        self.into = nn.Conv2d(1, channels, 3, padding=1)
        self.mid = nn.ModuleList(AttnBlock(channels) for _ in range(2))
        self.out = nn.Conv2d(channels, 1, 3, padding=1)

    def forward(self, x, t):
        h = self.into(x) + self.level(t)[:, :, None, None]
        for block in self.mid:
            h = F.silu(block(h))
        return self.out(h)


denoiser = Denoiser()
average = copy.deepcopy(denoiser).requires_grad_(False)
optimizer = torch.optim.Adam(denoiser.parameters(), lr=2e-4, fused=True)

# %% the training cell
BATCH = 4
for iteration in range(200):
    x0 = pictures[torch.randint(0, len(pictures), (BATCH,))]
    t = torch.randint(0, STEPS, (BATCH,))
    share, noise = left[t].view(-1, 1, 1, 1), torch.randn_like(x0)
    loss = F.mse_loss(denoiser(share.sqrt() * x0 + (1 - share).sqrt() * noise, t), noise)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(denoiser.parameters(), 1.0)
    optimizer.step()
    torch._foreach_lerp_(list(average.parameters()), list(denoiser.parameters()), 0.01)
