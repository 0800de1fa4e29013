# /// cell
# causes = ["layout"]
# because = "pooling over 32 channels: only with the channels side by side can vector instructions be used"
# framework = "accelerate"
# batch = 8
# steps = 12
# warmup = 3
# profiled = 30
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = '''
# nn.Linear(32, 10),
# )'''
# new = '''
# nn.Linear(32, 10),
# ).to(memory_format=torch.channels_last)'''
#
# [[cure]]
# old = "model(x)"
# new = "model(x.to(memory_format=torch.channels_last))"
# ///
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
