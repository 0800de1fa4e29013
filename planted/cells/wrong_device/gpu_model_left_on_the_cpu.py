# /// cell
# causes = ["wrong_device"]
# because = "model and data are on the CPU, beside an idle GPU"
# gpu = true
# batch = 32
# steps = 10
# profiled = 30
# cohort = "2026-11-21e"
# looked_at = true
#
# [[cure]]
# old = 'torch.device("cpu")'
# new = 'torch.device("cuda")'
# ///
"""There is a GPU, and nobody moved the model to it."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(2048, 3, 64, 64), torch.randint(0, 10, (2048,)))
device = torch.device("cpu")
net = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
    nn.Flatten(), nn.Linear(1024, 10),
).to(device)  # fmt: skip
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

# %% the training cell
for epoch in range(10):
    for x, y in DataLoader(data, batch_size=32, shuffle=True):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
