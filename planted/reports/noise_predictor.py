# /// cell
# because = "healthy"
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)
T = 1000
betas = torch.linspace(1e-4, 0.02, T)
alpha_bar = torch.cumprod(1 - betas, 0)
root_a, root_b = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
time_table = torch.cat([torch.sin(torch.arange(T)[:, None] / 10_000 ** (torch.arange(64) / 64)), torch.cos(torch.arange(T)[:, None] / 10_000 ** (torch.arange(64) / 64))], 1)


class Denoiser(nn.Module):
    def __init__(self, d=384):
        super().__init__()
        self.inp, self.time = nn.Linear(256, d), nn.Linear(128, d)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.SiLU(), nn.Linear(2 * d, d)) for _ in range(3)])
        self.out = nn.Linear(d, 256)

    def forward(self, x, t):
        h = self.inp(x) + self.time(time_table[t])
        for block in self.blocks:
            h = h + block(h)
        return self.out(h)


latents = torch.randn(8000, 256) @ torch.randn(256, 256) / 16
net = Denoiser()
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-4)
# %% the training cell
for step in range(60):
    x0 = latents[torch.randint(8000, (256,))]
    t = torch.randint(T, (256,))
    noise = torch.randn_like(x0)
    xt = root_a[t, None] * x0 + root_b[t, None] * noise
    loss = (net(xt, t) - noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
