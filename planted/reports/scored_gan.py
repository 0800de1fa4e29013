# /// cell
# cohort = "third"
# because = "The Frechet distance of the fakes is computed at each step, and scipy.linalg.sqrtm of the product of the two covariances takes much longer than the training step; compute it every 25th step."
# thread = "https://github.com/mseitzer/pytorch-fid/issues/83"
# line = "root = linalg.sqrtm(sigma_fake.dot(sigma_real))"
# callee = "scipy.linalg.sqrtm"
# faster = 3.30
# ///
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy import linalg

torch.manual_seed(0)
yy, xx = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij")
centre, width = torch.rand(2000, 2, 1, 1) - 0.5, torch.rand(2000, 1, 1) * 0.2 + 0.1
reals = torch.exp(-((xx - centre[:, 0]) ** 2 + (yy - centre[:, 1]) ** 2) / width)[:, None] * 2 - 1

embed = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(),
                      nn.Linear(256, 384)).requires_grad_(False)
generator = nn.Sequential(nn.Linear(32, 64 * 16), nn.Unflatten(1, (64, 4, 4)), nn.BatchNorm2d(64), nn.ReLU(),
                          nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
                          nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Tanh())
critic = nn.Sequential(nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2),
                       nn.Flatten(), nn.Linear(1024, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))


def statistics(pictures):
    with torch.no_grad():
        e = embed(pictures).double().numpy()
    return e.mean(0), np.cov(e, rowvar=False)


mu_real, sigma_real = statistics(reals)


def frechet_distance(pictures):
    mu_fake, sigma_fake = statistics(pictures)
    root = linalg.sqrtm(sigma_fake.dot(sigma_real))
    gap = mu_fake - mu_real
    return gap.dot(gap) + np.trace(sigma_fake) + np.trace(sigma_real) - 2 * np.trace(root.real)


# %% the training cell
for step in range(80):
    real = reals[torch.randint(len(reals), (64,))]
    fake = generator(torch.randn(64, 32))
    d_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
    d_optimizer.zero_grad()
    d_loss.backward()
    d_optimizer.step()
    g_loss = F.softplus(-critic(fake)).mean()
    g_optimizer.zero_grad()
    g_loss.backward()
    g_optimizer.step()
    fid = frechet_distance(fake.detach())
    if step % 25 == 0:
        print(f"step {step} d {d_loss.item():.3f} g {g_loss.item():.3f} fid {fid:.3f}")
print("last", g_loss.item())
