# /// cell
# knob = "cache"
# value = true
# truth = "faster"
# because = "decompressing an item takes longer than everything else"
# ///
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

from planted.datasets import Compressed
loader = DataLoader(Compressed(256), batch_size=16, shuffle=True)
model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

# %% the training cell
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
