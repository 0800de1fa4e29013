"""The demo's notebook cells as text, so that `make demo` runs the very code the quick-start notebook shows."""

from __future__ import annotations

SETUP = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

from gpulab.demo import DigitsFolder


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# 1797 handwritten digits: PNG files that take 2 ms to arrive, decoded and augmented on demand
dataset = DigitsFolder(arrive_ms=2)
model = nn.Sequential(block(1, 24), block(24, 48), nn.Flatten(), nn.Linear(48 * 8 * 8, 10))
model = model.to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_function = nn.CrossEntropyLoss()
"""

TRAINING = """\
loader = DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True)

for epoch in range(2):
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        loss = loss_function(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")
"""
