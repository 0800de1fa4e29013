# /// cell
# causes = ["cpu_oversubscribed"]
# because = "four workers of four threads each, on two cores, beside the training"
# batch = 16
# steps = 16
# warmup = 8
# fresh = true
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = "worker_init_fn=four_threads"
# new = "worker_init_fn=one_thread"
#
# [[cure]]
# old = "num_workers=4"
# new = "num_workers=2"
# ///
"""The training leaves the cores to its four workers, each of which computes with four threads."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Smoothed(Dataset):
    def __init__(self, count):
        self.images = torch.randn(count, 1, 3, 64, 64)
        self.kernel = torch.ones(3, 1, 5, 5) / 25

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        smooth = self.images[i]
        for _ in range(5):
            smooth = nn.functional.conv2d(smooth, self.kernel, padding=2, groups=3)
        return smooth[0, :, ::2, ::2], i % 10


def four_threads(worker):
    torch.set_num_threads(4)


def one_thread(worker):
    torch.set_num_threads(1)


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(),
    nn.Linear(8 * 32 * 32, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dataset = Smoothed(512)

# %% the training cell
loader = DataLoader(
    dataset, batch_size=16, shuffle=True, num_workers=4, worker_init_fn=four_threads, persistent_workers=True
)
for epoch in range(12):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
