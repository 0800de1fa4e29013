# /// cell
# causes = ["memory_bound_ops"]
# because = "twenty cheap operations on 64 million numbers each"
# gpu = true
# steps = 20
# cohort = "2026-11-21e"
#
# [[cure]]
# old = "wave = activation"
# new = "wave = torch.compile(activation)"
# ///
"""An activation of a dozen cheap operations on large tensors."""

import torch
from torch import nn

device = "cuda"


class Wavelet(nn.Module):
    def forward(self, x):
        y = torch.cos(1.75 * x) * torch.exp(-(x * x) / 2)
        y = y + 0.1 * torch.sin(3 * x) * torch.exp(-(x * x) / 4)
        return 0.9 * y + 0.1 * torch.tanh(x) + 0.01 * x


activation = Wavelet()
weights = nn.Parameter(torch.randn(64, 1024, 1024, device=device))
optimizer = torch.optim.SGD([weights], lr=1e-3, fused=True)

# %% the training cell
wave = activation
for step in range(200):
    optimizer.zero_grad(set_to_none=True)
    loss = wave(weights).square().mean()
    loss.backward()
    optimizer.step()
