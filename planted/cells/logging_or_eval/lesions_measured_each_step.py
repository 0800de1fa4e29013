# /// cell
# causes = ["logging_or_eval"]
# because = "72 distance transforms of the batch's masks after each step"
# batch = 12
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "MEASURE_EVERY = 1"
# new = "MEASURE_EVERY = 1000"
# ///
"""Lesions are segmented; Dice and the distance between the outlines go into a table after each step."""

import csv

import numpy as np
import torch
from scipy.ndimage import distance_transform_edt
from torch import nn

SIZE, CLASSES = 48, 4
rng = np.random.default_rng(5)
rows, columns = np.mgrid[:SIZE, :SIZE]


def scan():
    """Noise, with three round lesions of different kinds."""
    mask = np.zeros((SIZE, SIZE), dtype=np.int64)
    for kind in range(1, CLASSES):
        y, x, radius = rng.integers(10, 38), rng.integers(10, 38), rng.integers(4, 10)
        mask[(rows - y) ** 2 + (columns - x) ** 2 < radius**2] = kind
    return (mask + rng.normal(0, 0.7, mask.shape)).astype(np.float32), mask


scans, masks = (torch.from_numpy(np.stack(a)) for a in zip(*(scan() for _ in range(240)), strict=True))


def block(inside, out):
    return nn.Sequential(nn.Conv2d(inside, out, 3, padding=1), nn.ReLU())


class SmallUNet(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.down, self.bottom = block(1, width), block(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join, self.head = block(2 * width, width), nn.Conv2d(width, CLASSES, 1)

    def forward(self, x):
        skip = self.down(x)
        x = self.bottom(nn.functional.max_pool2d(skip, 2))
        return self.head(self.join(torch.cat([skip, self.up(x)], 1)))


def outline_distance(found, true):
    """Mean distance of what was found from what is there, and the other way round."""
    if not found.any() or not true.any():
        return float(SIZE)
    there, back = distance_transform_edt(~true)[found], distance_transform_edt(~found)[true]
    return float((there.mean() + back.mean()) / 2)


def measures(logits, mask):
    found, true = logits.argmax(1).numpy(), mask.numpy()
    line = {}
    for kind in range(1, CLASSES):
        pairs = [(f == kind, t == kind) for f, t in zip(found, true, strict=True)]
        line[f"dice {kind}"] = np.mean([2 * (f & t).sum() / max(1, f.sum() + t.sum()) for f, t in pairs])
        line[f"distance {kind}"] = np.mean([outline_distance(f, t) for f, t in pairs])
    return line


unet = SmallUNet()
optimizer = torch.optim.Adam(unet.parameters(), lr=2e-3, fused=True)
MEASURE_EVERY = 1
FIGURES = [f"{name} {kind}" for kind in range(1, CLASSES) for name in ("dice", "distance")]

# %% the training cell
step = 0
with open("measures.csv", "w", newline="") as file:
    table = csv.DictWriter(file, ["step", "loss", *FIGURES])
    table.writeheader()
    for epoch in range(8):
        order = torch.randperm(len(scans))
        for chosen in order.split(12):
            logits = unet(scans[chosen].unsqueeze(1))
            loss = nn.functional.cross_entropy(logits, masks[chosen])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            step += 1
            if step % MEASURE_EVERY == 0:
                table.writerow({"step": step, "loss": loss.item(), **measures(logits.detach(), masks[chosen])})
