# /// cell
# knob = "batch_size"
# value = 64
# truth = "faster"
# because = "a step for 4 samples costs nearly as much as one for 64: most of it is calling PyTorch"
# steps = 50
# ///
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

loader = DataLoader(TensorDataset(torch.randn(9999, 16), torch.randn(9999, 1)), batch_size=4, shuffle=True)
model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

# %% the training cell
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
