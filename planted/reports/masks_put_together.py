# /// cell
# cohort = "second"
# because = "The collate function makes tensors from lists of numpy arrays with torch.tensor, which walks through every single element in Python objects; np.stack (one array) before it is many times faster."
# thread = "https://github.com/pytorch/pytorch/issues/13918"
# line = "masks = torch.tensor([m for _, m in batch], dtype=torch.float32)"
# callee = "torch.tensor"
# faster = 1.52
# ///
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

rng = np.random.default_rng(3)
torch.manual_seed(3)


class Cells(Dataset):
    def __init__(self, n=640, size=96):
        yy, xx = np.mgrid[:size, :size]
        cx, cy, r = rng.uniform(16, 80, n), rng.uniform(16, 80, n), rng.uniform(6, 14, n)
        disc = ((xx - cx[:, None, None]) ** 2 + (yy - cy[:, None, None]) ** 2 < r[:, None, None] ** 2)
        self.masks = disc.astype(np.uint8)
        self.images = (disc * 0.7 + 0.3 * rng.standard_normal(disc.shape)).astype(np.float32)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.masks[i]


def collate(batch):
    images = torch.from_numpy(np.stack([im for im, _ in batch])).unsqueeze(1)
    masks = torch.tensor([m for _, m in batch], dtype=torch.float32)
    return images, masks.unsqueeze(1)


loader = DataLoader(Cells(), batch_size=16, shuffle=True, collate_fn=collate)
net = nn.Sequential(nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU(),
                    nn.ConvTranspose2d(24, 12, 2, 2), nn.ReLU(), nn.ConvTranspose2d(12, 1, 2, 2))
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
bce = nn.BCEWithLogitsLoss()
# %% the training cell
for epoch in range(4):
    total = 0.0
    for images, masks in loader:
        opt.zero_grad(set_to_none=True)
        loss = bce(net(images), masks)
        loss.backward()
        opt.step()
        total += loss.item() * len(images)
    print(f"epoch {epoch}: {total / len(loader.dataset):.5f}")
