# /// cell
# knob = "accumulate"
# value = 4
# truth = "no measurable difference"
# because = "convolutions take the step; there are four small tensors to update"
# steps = 12
# ///
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1),
)
loader = DataLoader(TensorDataset(torch.randn(512, 3, 32, 32), torch.randn(512, 1)), batch_size=32, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

# %% the training cell
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
