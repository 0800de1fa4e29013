# /// cell
# cohort = "fourth"
# because = "the boundary loss computes the signed distance maps of the ground-truth masks with scipy anew in every step, though they depend on the labels alone; compute the maps once per image before the training (or in the dataset) and only multiply in the loss"
# thread = "https://github.com/JunMa11/SegLossOdyssey/issues/42"
# line = "dist = np.stack([signed_distance(m) for m in onehot])"
# callee = "scipy.ndimage.distance_transform_edt"
# faster = 2.2
# ///
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.ndimage import distance_transform_edt
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(23)
rng = np.random.default_rng(23)

SIZE, CLASSES, BATCH = 96, 4, 12


def make_slice():
    yy, xx = np.mgrid[:SIZE, :SIZE]
    cx, cy = rng.uniform(35, 60, 2)
    rx, ry = rng.uniform(14, 26, 2)
    outer = ((xx - cx) / rx) ** 2 + ((yy - cy) / ry) ** 2
    mask = np.zeros((SIZE, SIZE), dtype=np.int64)
    side = ((xx - cx + 30) / 14) ** 2 + ((yy - cy) / 20) ** 2
    mask[side < 1] = 3
    mask[outer < 1] = 1
    mask[outer < rng.uniform(0.25, 0.5)] = 2
    image = np.array([0.0, 0.6, 1.2, 0.9])[mask] + 0.4 * rng.standard_normal((SIZE, SIZE))
    return image.astype(np.float32), mask


pairs = [make_slice() for _ in range(120)]
images = torch.from_numpy(np.stack([p[0] for p in pairs])).unsqueeze(1)
masks = torch.from_numpy(np.stack([p[1] for p in pairs]))


def signed_distance(onehot):
    res = np.zeros(onehot.shape, dtype=np.float32)
    for k in range(len(onehot)):
        pos = onehot[k].astype(bool)
        if pos.any():
            neg = ~pos
            res[k] = distance_transform_edt(neg) * neg - (distance_transform_edt(pos) - 1) * pos
    return res


class BoundaryLoss(nn.Module):
    def forward(self, logits, target):
        probs = torch.softmax(logits, dim=1)
        onehot = F.one_hot(target, CLASSES).permute(0, 3, 1, 2).numpy()
        dist = np.stack([signed_distance(m) for m in onehot])
        return (probs * torch.from_numpy(dist)).mean()


def block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU())


class SmallUNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.down1, self.down2 = block(8, 8), block(8, 16)
        self.middle = block(16, 32)
        self.up2, self.up1 = block(48, 16), block(24, 8)
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x):
        a = self.down1(self.stem(x))
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        a = self.up1(torch.cat([F.interpolate(b, scale_factor=2), a], 1))
        return F.interpolate(self.head(a), scale_factor=2, mode="bilinear")


loader = DataLoader(TensorDataset(images, masks), batch_size=BATCH, shuffle=True)
model = SmallUNet()
boundary = BoundaryLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

# %% the training cell
for epoch in range(18):
    for image, mask in loader:
        optimizer.zero_grad()
        logits = model(image)
        loss = F.cross_entropy(logits, mask) + 0.02 * boundary(logits, mask)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
