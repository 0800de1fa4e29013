# /// cell
# causes = ["cpu_preprocessing"]
# because = "decoding, rotating and blurring a photo takes longer than training on it"
# also = ["data_starved"]
# needs = ["PIL"]
# batch = 16
# steps = 24
# warmup = 12
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "dataset = Photos(1152)"
# new = '''
# photos = Photos(1152, train=False)
# dataset = [photos[i] for i in range(144)] * 8'''
# ///
"""Photos decoded from JPEG and augmented on demand, in the training process."""

import io
import random

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import nn
from torch.utils.data import DataLoader, Dataset

rng = np.random.default_rng(0)


def encoded(size=160):
    noise = rng.integers(0, 255, (size // 8, size // 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((size, size)).save(file, "JPEG", quality=90)
    return file.getvalue()


class Photos(Dataset):
    def __init__(self, count, train=True):
        self.files = [encoded() for _ in range(count // 8)] * 8
        self.train = train

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = Image.open(io.BytesIO(self.files[index])).convert("RGB")
        if self.train:
            image = image.rotate(random.uniform(-15, 15), resample=Image.BICUBIC)
            image = ImageOps.autocontrast(image.filter(ImageFilter.GaussianBlur(1)))
        image = image.resize((48, 48), Image.LANCZOS)
        x = torch.from_numpy(np.asarray(image, dtype=np.float32)).permute(2, 0, 1) / 255
        return x, index % 10


dataset = Photos(1152)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, stride=2, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# %% the training cell
train_loader = DataLoader(dataset, batch_size=16, shuffle=True)
criterion = nn.CrossEntropyLoss()
model.train()
for epoch in range(3):
    for x, y in train_loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
