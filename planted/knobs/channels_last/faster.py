# /// cell
# knob = "channels_last"
# value = true
# truth = "faster"
# because = "pooling over 32 channels: only with the channels side by side can vector instructions be used"
# ///
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(5, 1, 2), nn.MaxPool2d(5, 1, 2),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1),
)
loader = DataLoader(TensorDataset(torch.randn(256, 3, 32, 32), torch.randn(256, 1)), batch_size=8)

optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

# %% the training cell
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
