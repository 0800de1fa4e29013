# /// cell
# causes = ["storage_bound"]
# because = "each of 16 items waits 3 ms for its file, one after the other"
# also = ["data_starved"]
# batch = 16
# steps = 20
# warmup = 12
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "num_workers=0"
# new = "num_workers=4, persistent_workers=True"
# ///
"""A photo classifier; its folder lies on a network file system."""

import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FOLDER = Path("photos")
FOLDER.mkdir(exist_ok=True)
rng = np.random.default_rng(0)
for i in range(1200):
    np.save(FOLDER / f"{i:04}.npy", rng.integers(0, 255, (3, 32, 32), dtype=np.uint8))


class Photos(Dataset):
    def __init__(self, folder):
        self.files = sorted(folder.glob("*.npy"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        time.sleep(0.003)  # stands for the round trip to the file server
        image = np.load(self.files[index])
        return torch.from_numpy(image).float() / 255, index % 10


model = nn.Sequential(
    nn.Conv2d(3, 24, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(24, 48, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(768, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loss_function = nn.CrossEntropyLoss()

# %% the training cell
loader = DataLoader(Photos(FOLDER), batch_size=16, shuffle=True, num_workers=0)

for epoch in range(20):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = loss_function(model(images), labels)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.3f}")
