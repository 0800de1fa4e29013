# /// cell
# causes = []
# because = "convolutions take the step, and two workers have the next crops ready long before"
# batch = 24
# steps = 10
# warmup = 4
# tries = { workers = "4", batch_size = "48" }
# cohort = "2026-11-23"
# ///
"""Flat roof or pitched roof? (for the solar cadastre)"""

import numpy as np
import torch
import torch.nn as nn
from PIL import Image, ImageEnhance
from torch.utils.data import DataLoader, Dataset

BICUBIC = Image.Resampling.BICUBIC
rng = np.random.default_rng(180)


def fake_aerial(pitched: bool) -> Image.Image:
    ground = rng.integers(60, 120, (64, 64, 3), dtype=np.uint8)
    a, b = sorted(rng.integers(8, 56, 2))
    roof = ground.copy()
    roof[a : b + 6, 8:56] = (150, 60, 50) if pitched else (120, 120, 125)
    if pitched:
        roof[a : (a + b) // 2, 8:56] //= 2
    return Image.fromarray(roof)


class Roofs(Dataset):
    def __init__(self, n: int):
        self.y = rng.integers(0, 2, n)
        self.im = [fake_aerial(bool(p)) for p in self.y]

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int):
        im = self.im[i].rotate(90 * int(torch.randint(0, 4, ())))
        tilt = 20 * torch.rand(()).item() - 10  # at twice the size, or the edges of the roof fray
        im = im.resize((128, 128), BICUBIC).rotate(tilt, BICUBIC).resize((64, 64), BICUBIC)
        im = ImageEnhance.Brightness(im).enhance(0.8 + 0.4 * torch.rand(()).item())
        x, y = torch.randint(0, 17, (2,)).tolist()
        crop = np.asarray(im.crop((x, y, x + 48, y + 48)))
        return torch.from_numpy(crop.copy()).permute(2, 0, 1), int(self.y[i])


def cbr(i, o, s):
    return [nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]


torch.manual_seed(180)
roofs = Roofs(1440)
net = nn.Sequential(
    *cbr(3, 40, 1), *cbr(40, 80, 2), *cbr(80, 80, 1), *cbr(80, 160, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    nn.Linear(160, 2),
).to(memory_format=torch.channels_last)  # fmt: skip

# %% the training cell
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
dl = DataLoader(roofs, batch_size=24, shuffle=True, num_workers=2, persistent_workers=True, drop_last=True)
for epoch in range(3):
    for img, pitched in dl:
        img = img.to(torch.float32).div_(255).contiguous(memory_format=torch.channels_last)
        loss = nn.functional.cross_entropy(net(img), pitched)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, f"{loss.item():.3f}")
