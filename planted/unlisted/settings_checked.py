# /// cell
# because = "the whole configuration is read again from YAML in each step"
# callee = "yaml"
# ///
"""A schedule that people change while it trains: the file is read in each step."""

import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
with open("schedule.yaml", "w") as file:
    yaml.safe_dump({"lr": 0.001, "layers": [{"name": f"layer{i}", "lr": 0.1 / (i + 1)} for i in range(40)]}, file)
images = TensorDataset(torch.randn(12_800, 1, 14, 14), torch.randint(10, (12_800,)))
net = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3200, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
# %% the training cell
for x, label in DataLoader(images, batch_size=64, shuffle=True):
    with open("schedule.yaml") as file:
        schedule = yaml.safe_load(file)  # HOT
    for group in optimizer.param_groups:
        group["lr"] = schedule["lr"]
    loss = nn.functional.cross_entropy(net(x), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
