# /// cell
# causes = []
# because = "a denoiser of wide linear layers, whose products take the step"
# batch = 512
# steps = 12
# warmup = 3
# tries = { batch_size = "1024", workers = "2" }
# cohort = "2026-11-23"
# ///
# DDPM in the latent space of a (frozen, already applied) autoencoder. eps-prediction, cosine schedule.
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

T = 1000
LATENT = 128


def cosine_alpha_bar(t, s=0.008):
    return math.cos((t / T + s) / (1 + s) * math.pi / 2) ** 2


alpha_bar = torch.tensor([cosine_alpha_bar(t) for t in range(1, T + 1)]).clamp(1e-5, 0.99999)
sqrt_ab, sqrt_1mab = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()


def timestep_table(dim=64):
    freq = torch.exp(-math.log(10000) * torch.arange(dim // 2) / (dim // 2))
    angle = torch.arange(T)[:, None] * freq
    return torch.cat([angle.sin(), angle.cos()], 1)


class Denoiser(nn.Module):
    def __init__(self, width=768):
        super().__init__()
        self.register_buffer("time", timestep_table())
        self.net = nn.Sequential(
            nn.Linear(LATENT + 64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width),
            nn.ReLU(), nn.Linear(width, LATENT),
        )  # fmt: skip

    def forward(self, x_t, t):
        return self.net(torch.cat([x_t, self.time[t]], dim=1))


def diffusion_loss(model, x0):
    t = torch.randint(0, T, (x0.shape[0],))
    eps = torch.randn_like(x0)
    x_t = sqrt_ab[t, None] * x0 + sqrt_1mab[t, None] * eps
    return nn.functional.mse_loss(model(x_t, t), eps)


torch.manual_seed(2020)
mixing = torch.randn(16, LATENT) / 4
latents = torch.tanh(torch.randn(25600, 16)) @ mixing

# %% the training cell
denoiser = Denoiser()
opt = torch.optim.AdamW(denoiser.parameters(), lr=2e-4, weight_decay=0.0, fused=True)
for epoch in range(3):
    acc, n = torch.zeros(()), 0
    for (x0,) in DataLoader(TensorDataset(latents), batch_size=512, shuffle=True, drop_last=True):
        loss = diffusion_loss(denoiser, x0)
        opt.zero_grad()
        loss.backward()
        opt.step()
        acc += loss.detach()
        n += 1
    print(f"epoch {epoch}: eps mse {acc / n:.4f}")
