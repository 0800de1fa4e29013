# /// cell
# cohort = "fourth"
# because = "The collate function returns seven small tensors per image; every tensor a worker returns gets its own shared-memory segment and is handed over as its own file descriptor, which costs far more than the few bytes in it. Cure: concatenate each field over the batch into one tensor in the worker and split it again in the main process."
# thread = "https://github.com/roboflow/rf-detr/pull/1399"
# line = "for step, (images, targets) in enumerate(loader):"
# callee = "torch.multiprocessing.reductions.rebuild_storage_fd"
# faster = 3.6
# ///
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
rng = np.random.default_rng(0)
side, cells, kinds = 64, 8, 5


class RoadObjects(Dataset):
    def __init__(self, n):
        self.images = rng.integers(0, 90, (n, 3, side, side), dtype=np.uint8)
        self.boxes, self.labels = [], []
        for i in range(n):
            count = int(rng.integers(1, 9))
            corner = rng.integers(0, side - 20, (count, 2))
            extent = rng.integers(6, 20, (count, 2))
            kind = rng.integers(0, kinds, count)
            for (x, y), (w, h), k in zip(corner, extent, kind):
                self.images[i, k % 3, y:y + h, x:x + w] = 130 + 25 * k
            self.boxes.append(np.concatenate([corner, corner + extent], axis=1).astype(np.float32))
            self.labels.append(kind)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        boxes = torch.from_numpy(self.boxes[i])
        target = {
            "boxes": boxes,
            "labels": torch.from_numpy(self.labels[i]),
            "area": (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]),
            "iscrowd": torch.zeros(len(boxes), dtype=torch.uint8),
            "image_id": torch.tensor([i]),
            "size": torch.tensor([side, side]),
            "orig_size": torch.tensor([side * 4, side * 4]),
        }
        return torch.from_numpy(self.images[i]).float() / 255, target


def collate(batch):
    images, targets = zip(*batch)
    return torch.stack(images), list(targets)


class GridDetector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
            nn.Conv2d(64, 1 + 4 + kinds, 1),
        )

    def forward(self, x):
        return self.body(x)


def detection_loss(out, targets):
    present = torch.zeros(len(targets), cells, cells)
    where, boxes, labels = [], [], []
    for b, target in enumerate(targets):
        middle = (target["boxes"][:, :2] + target["boxes"][:, 2:]) / 2
        cell = (middle / side * cells).long().clamp(0, cells - 1)
        where.append(torch.stack([torch.full_like(cell[:, 0], b), cell[:, 1], cell[:, 0]]))
        boxes.append(target["boxes"] / side)
        labels.append(target["labels"])
    b, y, x = torch.cat(where, dim=1)
    present[b, y, x] = 1.0
    chosen = out[b, :, y, x]
    return (F.binary_cross_entropy_with_logits(out[:, 0], present)
            + F.smooth_l1_loss(chosen[:, 1:5], torch.cat(boxes))
            + F.cross_entropy(chosen[:, 5:], torch.cat(labels)))


dataset = RoadObjects(3200)
model = GridDetector()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=2, collate_fn=collate)

# %% the training cell
for step, (images, targets) in enumerate(loader):
    loss = detection_loss(model(images), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step} loss {loss.item():.4f}")
