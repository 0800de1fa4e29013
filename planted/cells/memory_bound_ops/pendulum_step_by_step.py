# /// cell
# causes = ["memory_bound_ops"]
# because = "sixty cheap operations on 400,000 numbers, each of which goes through memory"
# steps = 8
# warmup = 3
# profiled = 30
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "simulate = model"
# new = "simulate = torch.compile(model)"
# ///
"""A simulated pendulum in the loss: a long chain of cheap operations on many numbers."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Pendulum(nn.Module):
    def __init__(self, points=400_000):
        super().__init__()
        self.damping = nn.Parameter(torch.full((points,), 0.1))
        self.stiffness = nn.Parameter(torch.ones(points))

    def forward(self, angle, speed):
        for _ in range(6):
            force = -self.stiffness * torch.sin(angle) - self.damping * speed
            force = force * 0.98 + 0.02 * torch.tanh(force)
            speed = speed + 0.05 * force
            angle = angle + 0.05 * speed
        return angle


model = Pendulum()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
states = TensorDataset(torch.randn(60, 400_000), torch.randn(60, 400_000))

# %% the training cell
simulate = model
for epoch in range(4):
    for angle, speed in DataLoader(states, batch_size=None):
        optimizer.zero_grad()
        loss = simulate(angle, speed).square().mean()
        loss.backward()
        optimizer.step()
