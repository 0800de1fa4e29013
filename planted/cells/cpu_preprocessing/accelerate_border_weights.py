# /// cell
# causes = ["cpu_preprocessing"]
# because = "a distance transform for each nucleus of each image, in each epoch"
# also = ["data_starved"]
# framework = "accelerate"
# batch = 8
# steps = 40
# warmup = 10
# cohort = "2026-11-21d"
#
# [[cure]]
# old = '''
# weight_maps=None)
# loader'''
# new = '''
# weight_maps=[border_weights(owner) for _, owner in dishes])
# loader'''
# ///
"""U-Net for touching nuclei with Accelerate; the weights of the borders are worked out at each reading."""

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from scipy import ndimage
from torch import nn
from torch.utils.data import DataLoader, Dataset

set_seed(2015)
SIZE = 48


def dish(rng):
    """Round nuclei of one dish: picture, and the number of its nucleus for each pixel."""
    y, x = np.mgrid[:SIZE, :SIZE]
    owner = np.zeros((SIZE, SIZE), dtype=np.int64)
    for k in range(1, 25):
        cy, cx = rng.integers(4, SIZE - 4, 2)
        owner[(y - cy) ** 2 + (x - cx) ** 2 < rng.integers(9, 30)] = k
    picture = (owner > 0) * rng.uniform(0.4, 0.8) + 0.15 * rng.standard_normal(owner.shape)
    return picture.astype(np.float32), owner


def border_weights(owner, w0=10.0, sigma=5.0):
    """As in the U-Net paper: heavy where two nuclei are near each other."""
    far = [ndimage.distance_transform_edt(owner != k) for k in np.unique(owner) if k > 0]
    nearest = np.sort(np.stack(far), axis=0)[:2].sum(0)
    weights = 1 + w0 * np.exp(-(nearest**2) / (2 * sigma**2)) * (owner == 0)
    return weights.astype(np.float32)


class Nuclei(Dataset):
    def __init__(self, dishes, weight_maps=None):
        self.dishes = dishes
        self.weight_maps = weight_maps

    def __len__(self):
        return len(self.dishes)

    def __getitem__(self, idx):
        picture, owner = self.dishes[idx]
        weights = border_weights(owner) if self.weight_maps is None else self.weight_maps[idx]
        return {
            "image": torch.from_numpy(picture)[None],
            "mask": torch.from_numpy((owner > 0).astype(np.float32)),
            "weights": torch.from_numpy(weights),
        }


def double_conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.Conv2d(o, o, 3, padding=1), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, c=6):
        super().__init__()
        self.down1, self.down2 = double_conv(1, c), double_conv(c, 2 * c)
        self.up = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
        self.merge, self.out = double_conv(2 * c, c), nn.Conv2d(c, 1, 1)

    def forward(self, x):
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        return self.out(self.merge(torch.cat([fine, self.up(coarse)], 1)))[:, 0]


rng = np.random.default_rng(2015)
dishes = [dish(rng) for _ in range(160)]

# %% the training cell
accelerator = Accelerator(cpu=True)
train_set = Nuclei(dishes, weight_maps=None)
loader = DataLoader(train_set, batch_size=8, shuffle=True)
model = UNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.95, nesterov=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=8 * len(loader))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

model.train()
for epoch in range(8):
    for batch in loader:
        with accelerator.accumulate(model):
            logits = model(batch["image"])
            loss = F.binary_cross_entropy_with_logits(logits, batch["mask"], weight=batch["weights"])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}, lr {scheduler.get_last_lr()[0]:.4f}")
