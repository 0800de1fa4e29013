# /// cell
# causes = ["slow_collate"]
# because = "a data frame is made, pivoted and filled for each of the 16 stays of a batch"
# batch = 16
# steps = 24
# warmup = 12
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "collate_fn=pivoted"
# new = "collate_fn=scattered"
# ///
"""A GRU foretells what becomes of patients; a pandas pivot turns the ward's measurements into each batch."""

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(4)
HOURS, SIGNALS = 24, 12


class Stays(Dataset):
    """Of each stay its measurements as (hour, signal, value), as they come from the ward."""

    def __init__(self, n):
        rng = np.random.default_rng(4)
        self.events, self.died = [], rng.integers(0, 2, n)
        for _ in range(n):
            cells = rng.choice(HOURS * SIGNALS, size=rng.integers(60, 120), replace=False)
            self.events.append((cells // SIGNALS, cells % SIGNALS, rng.standard_normal(len(cells)).astype(np.float32)))

    def __len__(self):
        return len(self.died)

    def __getitem__(self, i):
        return self.events[i], self.died[i]


def pivoted(batch):
    grids = []
    for (hour, sign, value), _ in batch:
        frame = pd.DataFrame({"hour": hour, "sign": sign, "value": value})
        grid = frame.pivot(index="hour", columns="sign", values="value")
        grid = grid.reindex(index=range(HOURS), columns=range(SIGNALS)).ffill().fillna(0.0)
        grids.append(torch.tensor(grid.to_numpy(), dtype=torch.float32))
    return torch.stack(grids), torch.tensor([died for _, died in batch], dtype=torch.float32)


def scattered(batch):
    grid = np.full((len(batch), HOURS, SIGNALS), np.nan, dtype=np.float32)
    for row, ((hour, sign, value), _) in enumerate(batch):
        grid[row, hour, sign] = value
    last = np.where(np.isnan(grid), 0, np.arange(HOURS)[:, None])
    grid = np.take_along_axis(grid, np.maximum.accumulate(last, axis=1), axis=1)
    return torch.from_numpy(np.nan_to_num(grid)), torch.tensor([died for _, died in batch], dtype=torch.float32)


class Outcome(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.gru = nn.GRU(SIGNALS, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.out(self.gru(x)[0][:, -1]).squeeze(-1)


stays = Stays(640)
net = Outcome()
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, fused=True)
criterion = nn.BCEWithLogitsLoss()

# %% the training cell
loader = DataLoader(stays, batch_size=16, shuffle=True, collate_fn=pivoted)
history = []
for epoch in range(5):
    net.train()
    losses = []
    for x, y in loader:
        loss = criterion(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.detach())
    history.append(torch.stack(losses).mean())
    print(f"[{epoch + 1}] {history[-1]:.4f}")
