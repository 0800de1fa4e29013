# /// cell
# causes = []
# because = "a wide LSTM over 40 cycles of 128 engines; its matrix products take the step"
# batch = 128
# steps = 8
# warmup = 2
# tries = { workers = "2", batch_size = "256", fused_optimizer = "True" }
# cohort = "2026-11-23"
# ///
"""Remaining useful life of turbofans (synthetic C-MAPSS), 2-layer LSTM, piecewise-linear target."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

CYCLES, SENSORS, CAP = 40, 24, 125


class Engines(Dataset):
    def __init__(self, units: int):
        life = torch.randint(60, 300, (units, 1)).float()
        now = (torch.rand(units, 1) * (life - CYCLES)).clamp(min=0) + CYCLES
        t = now - CYCLES + torch.arange(CYCLES)
        wear = (t / life) ** 3
        gain = torch.linspace(-2, 2, SENSORS)
        self.x = wear.unsqueeze(2) * gain + 0.15 * torch.randn(units, CYCLES, SENSORS)
        self.rul = (life - now).clamp(max=CAP).squeeze(1) / CAP

    def __len__(self):
        return len(self.rul)

    def __getitem__(self, i):
        return self.x[i], self.rul[i]


class LifeLSTM(nn.Module):
    def __init__(self, hidden=320):
        super().__init__()
        self.lstm = nn.LSTM(SENSORS, hidden, num_layers=1, batch_first=True)
        self.regress = nn.Linear(hidden, 1)

    def forward(self, x):
        h, _ = self.lstm(x)
        return self.regress(h[:, -1]).squeeze(1)


torch.manual_seed(100)
train_part, val_part = random_split(Engines(5120), [4608, 512])

# %% the training cell
model = LifeLSTM()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
for epoch in range(3):
    model.train()
    for x, rul in DataLoader(train_part, batch_size=128, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), rul)
        loss.backward()
        optimizer.step()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        errors = [((model(x) - rul) ** 2).sum() for x, rul in DataLoader(val_part, batch_size=256)]
    print(f"epoch {epoch}: val RMSE {CAP * math.sqrt(sum(errors) / len(val_part)):.1f} cycles")
