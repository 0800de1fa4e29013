# /// cell
# because = "scikit-learn sorts ten thousand validation scores in each step"
# callee = "sklearn.metrics.roc_auc_score"
# ///
"""Clicks on adverts; a fixed set of scores is judged anew in each step."""

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

torch.manual_seed(2)
users = torch.randn(512, 128)
clicked = torch.randint(2, (512, 1)).float()
net = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
truth, scores = np.random.default_rng(0).integers(0, 2, 20_000), np.random.default_rng(1).random(20_000)
areas = []
# %% the training cell
for step in range(350):
    rows = torch.arange(step % 4 * 128, step % 4 * 128 + 128)
    loss = nn.functional.binary_cross_entropy_with_logits(net(users[rows]), clicked[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    areas.append(roc_auc_score(truth, scores))  # HOT
