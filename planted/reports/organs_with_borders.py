# /// cell
# cohort = "second"
# because = "The boundary loss computes the distance maps of the labels with scipy in every iteration, for masks that never change; they can be computed once beforehand (in the dataset)."
# thread = "https://github.com/JunMa11/SegLossOdyssey/issues/42"
# line = "maps = torch.stack([torch.from_numpy(distance_map(m.numpy(), probs.shape[1])) for m in masks])"
# callee = "scipy.ndimage.distance_transform_edt"
# faster = 2.18
# ///
import numpy as np
import torch
import torch.nn as nn
from scipy.ndimage import distance_transform_edt

torch.manual_seed(0)
rng = np.random.default_rng(0)


def distance_map(mask, n_classes):
    out = np.zeros((n_classes, *mask.shape), dtype=np.float32)
    for c in range(1, n_classes):
        inside = mask == c
        if inside.any():
            out[c] = distance_transform_edt(~inside) * ~inside - (distance_transform_edt(inside) - 1) * inside
    return out


def boundary_loss(logits, masks):
    probs = logits.softmax(1)
    maps = torch.stack([torch.from_numpy(distance_map(m.numpy(), probs.shape[1])) for m in masks])
    return (probs * maps).mean()


yy, xx = np.mgrid[:96, :96]
labels = np.zeros((80, 96, 96), dtype=np.int64)
for lab in labels:
    for c in range(1, 8):
        cy, cx, r = rng.uniform(20, 76), rng.uniform(20, 76), rng.uniform(6, 14)
        lab[(yy - cy) ** 2 + (xx - cx) ** 2 < r * r] = c
masks = torch.from_numpy(labels)
scans = masks[:, None].float() * 0.2 + torch.randn(80, 1, 96, 96) * 0.3
net = nn.Sequential(nn.Conv2d(1, 16, 5, stride=4, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
                    nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(32, 8, 4, stride=4))
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
# %% the training cell
for epoch in range(8):
    order = torch.randperm(len(scans))
    for i in range(0, len(order), 8):
        rows = order[i:i + 8]
        logits = net(scans[rows])
        loss = nn.functional.cross_entropy(logits, masks[rows]) + 0.01 * boundary_loss(logits, masks[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, loss.item())
