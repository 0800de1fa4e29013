# /// cell
# because = "averaged weights are updated in Python, tensor by tensor and through a state_dict"
# callee = "Average.update"
# own = "averaging"
# ///
"""A deep narrow network whose averaged weights are kept by a class beside the notebook."""

import torch
from averaging import Average
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(15)
series = TensorDataset(torch.randn(19_200, 64), torch.randn(19_200, 1))
layers = [layer for _ in range(24) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
net = nn.Sequential(*layers, nn.Linear(64, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
average = Average(net, (0.9, 0.99, 0.999))
# %% the training cell
for epoch in range(2):
    for x, y in DataLoader(series, batch_size=64, shuffle=True):
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(net)  # HOT
