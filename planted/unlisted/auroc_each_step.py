# /// cell
# because = "torchmetrics computes the AUROC of all predictions so far after each step"
# callee = "BinaryAUROC.compute"
# ///
"""Loans that default, told from 64 figures; the AUROC of the last thousands is shown after each step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC

torch.manual_seed(1)
figures = torch.randn(25_600, 64)
defaults = (figures[:, :8].sum(1) + torch.randn(25_600) > 0).float()
net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
auroc = BinaryAUROC()
auroc.update(torch.rand(30_000), torch.randint(2, (30_000,)))
shown = []
# %% the training cell
loader = DataLoader(TensorDataset(figures, defaults), batch_size=128, shuffle=True)
for epoch in range(2):
    for x, y in loader:
        scores = net(x).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auroc.update(scores.detach(), y.long())
        area = auroc.compute()  # HOT
        shown.append(float(area))
