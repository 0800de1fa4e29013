# /// cell
# causes = ["small_batch"]
# because = "an iteration for 4 points costs nearly as much as one for 64"
# batch = 4
# cured_batch = 64
# steps = 100
# profiled = 100
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = "batch_size = 4"
# new = "batch_size = 64"
# ///
"""A GAN on points, four of them at a time: two optimizers step in each iteration."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
points = TensorDataset(torch.randn(8192, 2) @ torch.tensor([[1.0, 0.5], [0.0, 0.3]]))
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optimizer_g = torch.optim.SGD(generator.parameters(), lr=1e-3, foreach=True)
optimizer_d = torch.optim.SGD(critic.parameters(), lr=1e-3, foreach=True)
bce = nn.BCEWithLogitsLoss()
batch_size = 4

# %% the training cell
for epoch in range(3):
    for (real,) in DataLoader(points, batch_size=batch_size, shuffle=True, drop_last=True):
        fake = generator(torch.randn(len(real), 8))
        optimizer_d.zero_grad()
        loss_d = bce(critic(real), torch.ones(len(real), 1)) + bce(critic(fake.detach()), torch.zeros(len(real), 1))
        loss_d.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        bce(critic(fake), torch.ones(len(real), 1)).backward()
        optimizer_g.step()
