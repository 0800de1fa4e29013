# /// cell
# causes = ["checkpoint_save"]
# because = "15 MB are written every fourth step"
# batch = 128
# steps = 40
# warmup = 4
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "SAVE_EVERY = 4"
# new = "SAVE_EVERY = 4000"
# ///
"""A regression on a table; afraid of losing work, the training saves itself every four steps."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Path("checkpoints").mkdir(exist_ok=True)
table = TensorDataset(torch.randn(8192, 64), torch.randn(8192, 1))
model = nn.Sequential(
    nn.Linear(64, 768), nn.GELU(), nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 1)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
SAVE_EVERY = 4

# %% the training cell
step = 0
for epoch in range(10):
    for features, target in DataLoader(table, batch_size=128, shuffle=True):
        loss = nn.functional.mse_loss(model(features), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % SAVE_EVERY == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                f"checkpoints/step_{step % 20}.pt",
            )
