# /// cell
# causes = ["cpu_preprocessing", "gc_pause"]
# because = "each image is warped with splines, and all that the notebook holds is walked over every 20th step"
# also = ["data_starved"]
# batch = 16
# steps = 40
# warmup = 20
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "Cells(images, warp=True)"
# new = "Cells([elastic(i, np.random.default_rng(0)) for i in images], warp=False)"
#
# [[second_cure]]
# old = "            gc.collect()  # keeps the memory low\n"
# new = "            pass\n"
# ///
"""A denoising diffusion model of cell images, which are warped when they are read, with a tidy-up every 20th step."""

import copy
import gc

import numpy as np
import torch
from scipy import ndimage
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(6)
STEPS, SIDE = 200, 72
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.03, STEPS), 0)
grid = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij")).astype(np.float32)


def blobs(n):
    rng = np.random.default_rng(6)
    return [ndimage.gaussian_filter(rng.standard_normal((SIDE, SIDE)).astype(np.float32), 3) * 10 for _ in range(n)]


def elastic(image, rng, strength=20.0):
    """Pushes each pixel somewhere near."""
    push = np.stack([ndimage.gaussian_filter(rng.standard_normal((SIDE, SIDE)), 5) for _ in range(2)])
    return ndimage.map_coordinates(image, grid + strength * push, order=3, mode="reflect")


class Cells(Dataset):
    def __init__(self, images, warp=True):
        self.images, self.warp = images, warp
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = elastic(self.images[i], self.rng) if self.warp else self.images[i]
        return torch.from_numpy(np.ascontiguousarray(image[None, ::3, ::3]))


class Denoiser(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.time = nn.Embedding(STEPS, width)
        self.inp, self.out = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.mid = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x, t):
        h = self.inp(x) + self.time(t)[:, :, None, None]
        for conv in self.mid:
            h = h + conv(torch.relu(h))
        return self.out(h)


images = blobs(256)
model = Denoiser()
ema = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)


@torch.no_grad()
def follow(decay=0.995):
    for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, 1 - decay)


# %% the training cell
loader = DataLoader(Cells(images, warp=True), batch_size=16, shuffle=True)
step = 0
for epoch in range(14):
    for x0 in loader:
        t = torch.randint(0, STEPS, (len(x0),))
        a = alphas[t].view(-1, 1, 1, 1)
        noise = torch.randn_like(x0)
        loss = (model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t) - noise).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        follow()
        step += 1
        if step % 20 == 0:
            gc.collect()  # keeps the memory low
