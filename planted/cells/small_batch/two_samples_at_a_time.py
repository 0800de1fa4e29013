# /// cell
# causes = ["small_batch"]
# because = "a step for 2 samples costs nearly as much as one for 64"
# batch = 2
# cured_batch = 64
# steps = 200
# warmup = 10
# profiled = 100
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "BATCH_SIZE = 2"
# new = "BATCH_SIZE = 64"
# ///
"""A perceptron fed two samples at a time."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
BATCH_SIZE = 2
dataset = TensorDataset(torch.randn(20_000, 40), torch.randint(0, 3, (20_000,)))
model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)

# %% the training cell
loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
for epoch in range(3):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
