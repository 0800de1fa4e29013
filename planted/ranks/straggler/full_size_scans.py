# /// cell
# cause = "straggler"
# because = "the shard of rank 1 holds full-size scans, which are shrunk while they are loaded; rank 0 has thumbnails"
# cohort = "2026-11-25a"
# written_ms = 210.8
# without_ms = 138.6
#
# [[without]]
# old = "SIDES = (64, 1280)"
# new = "SIDES = (64, 64)"
# ///
"""Cells under a microscope, as many images in each rank; the second laboratory exports its scans in full size."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SIDES = (64, 1280)  # pixels of a scan, by laboratory
MODEL_SIDE = 32


class Scans(Dataset):
    """The scans of one laboratory."""

    def __init__(self, laboratory: int) -> None:
        rng = np.random.default_rng(laboratory)
        side = SIDES[laboratory]
        self.scans = [rng.random((side, side), dtype=np.float32) for _ in range(12)]
        self.labels = rng.integers(0, 5, 640)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index):
        scan = self.scans[index % len(self.scans)]
        block = scan.shape[0] // MODEL_SIDE
        small = scan.reshape(MODEL_SIDE, block, MODEL_SIDE, block).mean(axis=(1, 3))
        return torch.from_numpy((small - small.mean()) / small.std())[None], int(self.labels[index])


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 64, 5),
)  # fmt: skip
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loader = DataLoader(Scans(rank), batch_size=32, shuffle=True)
for epoch in range(6):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
dist.destroy_process_group()
