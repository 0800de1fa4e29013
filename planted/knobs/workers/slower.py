# /// cell
# knob = "workers"
# value = 2
# truth = "slower"
# because = "an epoch of four steps of less than a millisecond, and each epoch starts two processes"
# steps = 20
# ///
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

loader = DataLoader(TensorDataset(torch.randn(64, 16), torch.randn(64, 1)), batch_size=16, shuffle=True)
model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

# %% the training cell
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
