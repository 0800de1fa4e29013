# /// cell
# causes = []
# because = "two volumes fill a step with convolutions in three dimensions, each of which takes milliseconds"
# batch = 2
# steps = 8
# warmup = 2
# tries = { batch_size = "4", workers = "1" }
# cohort = "2026-11-23"
# looked_at = true
# ///
"""Pancreas in abdominal CT, 3D. patch size (24,40,40), batch 2 -- as nnU-Net plans it, only smaller."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

PATCH = (24, 40, 40)


class Patches(Dataset):
    def __init__(self, n_cases=24, patches_per_epoch=240):
        rs = np.random.RandomState(0)
        self.ct = rs.normal(0, 1, (n_cases, 32, 56, 56)).astype(np.float32)
        z, y, x = np.ogrid[:32, :56, :56]
        centre = rs.randint((10, 18, 18), (22, 38, 38), (n_cases, 3))
        r = rs.randint(6, 12, n_cases)
        self.seg = np.stack(
            [(z - c[0]) ** 2 + (y - c[1]) ** 2 + (x - c[2]) ** 2 < k**2 for c, k in zip(centre, r, strict=True)]
        )
        self.ct += 1.5 * self.seg
        self.n = patches_per_epoch

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        case = i % len(self.ct)
        corner = [np.random.randint(0, s - p + 1) for s, p in zip(self.ct.shape[1:], PATCH, strict=True)]
        window = tuple(slice(c, c + p) for c, p in zip(corner, PATCH, strict=True))
        return torch.from_numpy(self.ct[case][window])[None], torch.from_numpy(self.seg[case][window]).float()[None]


def conv(cin, cout, stride=1):
    return nn.Sequential(nn.Conv3d(cin, cout, 3, stride=stride, padding=1), nn.LeakyReLU(0.01, inplace=True))


class SmallUNet3d(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.enc1 = conv(1, c)
        self.enc2 = conv(c, 2 * c, stride=2)
        self.bottom = conv(2 * c, 2 * c)
        self.up = nn.ConvTranspose3d(2 * c, c, 2, stride=2)
        self.dec = conv(2 * c, c)
        self.seg = nn.Conv3d(c, 1, 1)

    def forward(self, x):
        skip = self.enc1(x)
        low = self.bottom(self.enc2(skip))
        return self.seg(self.dec(torch.cat([skip, self.up(low)], 1)))


def dice_ce(logits, target):
    p = logits.sigmoid()
    dice = (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)
    return F.binary_cross_entropy_with_logits(logits, target) + 1 - dice


torch.manual_seed(0)
patches = Patches()

# %% the training cell
net = SmallUNet3d().to(memory_format=torch.channels_last_3d)
opt = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.99, nesterov=True, fused=True)
for epoch in range(1):
    for ct, seg in DataLoader(patches, batch_size=2, shuffle=True):
        loss = dice_ce(net(ct), seg)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 12)
        opt.step()
    print("pseudo dice", 1 - loss.item())
