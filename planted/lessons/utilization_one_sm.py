# /// cell
# lesson = "01"
# because = "a kernel of one block runs all the time: NVML says 100 %, and one multiprocessor of the GPU works"
# steps = 60
# small = { LENGTH = "500" }
#
# [[recording]]
# name = "utilization-one-sm"
# ///
"""A running sum over a long measurement: each channel is one thread, so all of it is one block of the GPU."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = 100_000
torch.manual_seed(0)
signal = torch.randn(LENGTH, 32, device=device)
model = nn.Linear(32, 32).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

# %% the training cell
for _ in range(400):
    level = model(signal).cumsum(0)
    loss = level.square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
