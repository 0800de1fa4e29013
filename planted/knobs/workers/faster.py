# /// cell
# knob = "workers"
# value = 2
# truth = "faster"
# because = "each item waits 2 ms for storage, and two processes wait at the same time"
# ///
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

from planted.datasets import Stored
loader = DataLoader(Stored(8192, wait_s=0.002), batch_size=8, shuffle=True)

model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

# %% the training cell
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
