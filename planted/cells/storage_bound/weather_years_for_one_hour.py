# /// cell
# causes = ["storage_bound"]
# because = "for one hour of the weather the file of the whole year is read"
# also = ["cpu_preprocessing"]
# batch = 16
# cohort = "2026-11-23"
#
# [[cure]]
# old = "np.load(self.root / f\"{year}.npy\")"
# new = "np.load(self.root / f\"{year}.npy\", mmap_mode=\"r\")"
# ///
"""Downscale 500 hPa fields: 32x64 coarse -> 6 h later.  Years live in one .npy each, because that is how the
post-processing on the HPC writes them."""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

LAT, LON = 32, 64
STEPS_PER_YEAR = 1460  # 6-hourly


def write_dummy_reanalysis(root, years, seed=500):
    rng = np.random.default_rng(seed)
    root.mkdir(exist_ok=True)
    lat = np.cos(np.linspace(-np.pi / 2, np.pi / 2, LAT))[:, None]
    for y in years:
        phase = rng.uniform(0, 2 * np.pi, STEPS_PER_YEAR)[:, None, None]
        z500 = 5500 + 150 * lat * np.sin(np.linspace(0, 10, LON) + phase)
        np.save(root / f"{y}.npy", z500.astype("float32"))


class Z500(Dataset):
    mean, std = 5500.0, 150.0

    def __init__(self, root, years):
        self.root = Path(root)
        self.index = [(y, t) for y in years for t in range(STEPS_PER_YEAR - 1)]

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        year, t = self.index[i]
        fields = np.load(self.root / f"{year}.npy")
        pair = (np.array(fields[t : t + 2]) - self.mean) / self.std
        return torch.from_numpy(pair[:1]), torch.from_numpy(pair[1:])


class CircularConv(nn.Conv2d):
    """longitude wraps around, latitude does not"""

    def forward(self, x):
        x = nn.functional.pad(x, (1, 1, 0, 0), mode="circular")
        x = nn.functional.pad(x, (0, 0, 1, 1))
        return super().forward(x)


def make_net(c=8):
    return nn.Sequential(CircularConv(1, c, 3), nn.ReLU(), CircularConv(c, c, 3), nn.ReLU(), CircularConv(c, 1, 3))


YEARS = range(2001, 2005)
write_dummy_reanalysis(Path("z500"), YEARS)
torch.manual_seed(500)

# %% the training cell
ds = Z500("z500", YEARS)
loader = DataLoader(ds, batch_size=16, shuffle=True, drop_last=True)
net = make_net()
opt = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
weights = torch.cos(torch.linspace(-1.5, 1.5, LAT))[:, None]

for it, (now, later) in enumerate(loader):
    loss = (weights * (net(now) - later) ** 2).mean()
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if it % 50 == 0:
        print(it, float(loss) ** 0.5 * ds.std, "m")
