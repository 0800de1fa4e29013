# /// cell
# causes = ["storage_bound"]
# because = "two files of each of 8 tiles wait 4 ms for the share, one after the other"
# also = ["data_starved"]
# framework = "accelerate"
# batch = 8
# warmup = 15
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "batch_size=8, shuffle=True)"
# new = "batch_size=8, shuffle=True, num_workers=4, persistent_workers=True)"
# ///
"""A U-Net on satellite tiles that lie on a mounted share that is slow to open them; Accelerate."""

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

set_seed(2)


class Share:
    """The mount: each file that is opened waits for the server."""

    def __init__(self, root, round_trip):
        self.root, self.round_trip = root, round_trip

    def load(self, name):
        with open(self.root / name, "rb") as file:
            time.sleep(self.round_trip)
            return np.load(file)


class Tiles(Dataset):
    def __init__(self, load, count):
        self.load, self.count = load, count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        image, mask = self.load(f"image_{i:04}.npy"), self.load(f"mask_{i:04}.npy")
        return {"image": torch.from_numpy(image), "mask": torch.from_numpy(mask).float()}


def conv(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, bands=4, width=12):
        super().__init__()
        self.down1, self.down2 = conv(bands, width), conv(width, 2 * width)
        self.middle = conv(2 * width, 2 * width)
        self.up1, self.up2 = conv(4 * width, width), conv(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        x = self.up1(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2), a], 1))
        return self.out(x).squeeze(1)


def dice_loss(logits, mask):
    p = logits.sigmoid()
    return 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)


COUNT = 240
folder = Path(tempfile.mkdtemp())
rng = np.random.default_rng(2)
for i in range(COUNT):
    image = rng.standard_normal((4, 32, 32), dtype=np.float32)
    np.save(folder / f"image_{i:04}.npy", image)
    np.save(folder / f"mask_{i:04}.npy", image.mean(0) > 0.2)
share = Share(folder, round_trip=0.004)

# %% the training cell
accelerator = Accelerator(cpu=True)
model = UNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
loader = DataLoader(Tiles(share.load, COUNT), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(6):
    model.train()
    for batch in loader:
        logits = model(batch["image"])
        loss = F.binary_cross_entropy_with_logits(logits, batch["mask"]) + dice_loss(logits, batch["mask"])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"epoch {epoch} done, last loss {loss.detach():.3f}")
