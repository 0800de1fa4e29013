# /// cell
# because = "a tracker written in Python counts confusions pair by pair"
# callee = "ConfusionTracker.update"
# own = "confusion_tracker"
# ///
"""Mushrooms by their pictures; who is taken for whom is counted in each step."""

import torch
from confusion_tracker import ConfusionTracker
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(12)
pictures = TensorDataset(torch.randn(9_600, 3, 10, 10), torch.randint(60, (9_600,)))
net = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 60))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
tracker = ConfusionTracker(60)
# %% the training cell
for epoch in range(2):
    for x, y in DataLoader(pictures, batch_size=32, shuffle=True):
        logits = net(x)
        loss = nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tracker.update(logits.argmax(1).tolist(), y.tolist())  # HOT
