# /// cell
# because = "healthy"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class VAE(nn.Module):
    def __init__(self, z=16):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.mu, self.logvar, self.up = nn.Linear(64 * 49, z), nn.Linear(64 * 49, z), nn.Linear(z, 64 * 49)
        self.dec = nn.Sequential(nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(self.up(z).view(-1, 64, 7, 7)), mu, logvar


digits = (torch.rand(3000, 1, 7, 7) > 0.6).float().repeat_interleave(4, 2).repeat_interleave(4, 3)
vae = VAE()
optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)
# %% the training cell
for step, idx in enumerate(torch.randperm(3000).repeat(3).split(48)[:60]):
    x = digits[idx]
    logits, mu, logvar = vae(x)
    rec = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum() / len(x)
    loss = rec + kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(step, rec.item(), kl.item())
