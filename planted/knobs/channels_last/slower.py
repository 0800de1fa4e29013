# /// cell
# knob = "channels_last"
# value = true
# truth = "slower"
# because = "pooling over 3 channels: side by side they are too few for a vector, and rows were long"
# ///
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

model = nn.Sequential(
    nn.Conv2d(3, 3, 1), nn.AvgPool2d(3, 1, 1), nn.MaxPool2d(3, 1, 1),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1),
)
loader = DataLoader(TensorDataset(torch.randn(128, 3, 96, 96), torch.randn(128, 1)), batch_size=8)

optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

# %% the training cell
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
