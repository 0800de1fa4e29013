# /// cell
# lesson = "10"
# because = "a network of 16 channels: its kernels are so short that launching them is the step"
# steps = 120
# small = { COUNT = "512" }
# on_cpu = [["batch_size=32", "batch_size=4"]]
#
# [[recording]]
# name = "search-width-16"
#
# [[recording]]
# name = "search-width-128"
# because = "64 times the arithmetic of 16 channels"
# edits = [["width = 16", "width = 128"]]
# ///
"""One trial of a search: a small network on images of 8 by 8, which are not turned."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
COUNT = 8192
torch.manual_seed(0)
digits = TensorDataset(torch.randn(COUNT, 1, 8, 8), torch.randint(0, 10, (COUNT,)))


def network(width, depth):
    layers = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * width, 10))


# %% the training cell
width = 16
model = network(width, depth=3).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
loader = DataLoader(digits, batch_size=32, shuffle=True, drop_last=True)
for _ in range(20):
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
