# /// cell
# causes = []
# because = "convolutions take the step"
# batch = 32
# steps = 10
# warmup = 3
# tries = { workers = "2", fused_optimizer = "True", batch_size = "64" }
# cohort = "2026-11-21a"
# looked_at = true
# ///
"""An image classifier whose images are in memory already."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images = torch.randn(1024, 16, 20, 20)
labels = torch.randint(0, 10, (1024,))
model = nn.Sequential(
    nn.Conv2d(16, 64, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(64, 64, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(64, 64, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(6400, 10),
)
model = model.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)

# %% the training cell
loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True, drop_last=True)
for epoch in range(10):
    for x, y in loader:
        x = x.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
