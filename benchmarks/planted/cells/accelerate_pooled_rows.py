"""A network of poolings and depthwise convolutions, its channels apart in memory; Accelerate."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pictures = TensorDataset(torch.randn(256, 3, 32, 32), torch.randint(0, 10, (256,)))
net = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(5, 1, 2), nn.MaxPool2d(5, 1, 2), nn.AvgPool2d(3, 1, 1),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
)  # fmt: skip

# %% the training cell
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, foreach=True)
model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(pictures, batch_size=8, shuffle=True))
for epoch in range(6):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
