# /// cell
# causes = ["slow_collate"]
# because = "the collate function makes a data frame of each patient's day and fills its gaps with pandas"
# batch = 24
# cohort = "2026-11-23"
#
# [[cure]]
# old = '''
#     days = [fill_gaps(raw) for raw, _ in samples]
# '''
# new = '''
#     days = [raw for raw, _ in samples]
# '''
#
# [[cure]]
# old = "pairs = list(zip(days, in_an_hour, strict=True))"
# new = "pairs = [(fill_gaps(d), y) for d, y in zip(days, in_an_hour, strict=True)]"
# ///
# %% CGM forecasting, cohort B
# Sensors drop out when patients lie on them, so a day of 288 readings has holes. Interpolate up to 1 h, then ffill.

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader

gen = np.random.default_rng(5)
torch.manual_seed(5)

N_DAYS = 1200
minutes = np.arange(288) * 5


def simulate_day():
    meals = sum(
        gen.uniform(20, 90) * np.exp(-(((minutes - m) / gen.uniform(40, 90)) ** 2))
        for m in gen.normal([450, 780, 1140], 40)
    )
    g = 100 + meals + gen.normal(0, 4, 288)
    for start in gen.integers(0, 270, 3):
        g[start : start + gen.integers(3, 18)] = np.nan
    hr = 70 + 20 * np.sin(minutes / 230) + gen.normal(0, 3, 288)
    return np.stack([g, hr], 1).astype(np.float32)


days = [simulate_day() for _ in range(N_DAYS)]
in_an_hour = [np.float32(np.nanmean(d[-12:, 0]) / 100) for d in days]


def fill_gaps(raw):
    df = pd.DataFrame(raw[:276], columns=["glucose", "hr"], index=pd.date_range("2024-01-01", periods=276, freq="5min"))
    df["glucose"] = df["glucose"].interpolate(method="time", limit=12).ffill().bfill()
    df["trend"] = df["glucose"].diff().fillna(0).rolling(6, min_periods=1).mean()
    df["high"] = (df["glucose"] > 180).astype("float32")
    return df.to_numpy(dtype=np.float32)


def collate(samples):
    days = [fill_gaps(raw) for raw, _ in samples]
    x = torch.from_numpy(np.stack(days)) / torch.tensor([100.0, 70.0, 1.0, 1.0])
    y = torch.from_numpy(np.array([y for _, y in samples]))
    return x.transpose(1, 2), y


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(4, 96, 7, stride=2), nn.ReLU(), nn.Conv1d(96, 64, 7, stride=2), nn.ReLU(), nn.AdaptiveAvgPool1d(4)
        )
        self.out = nn.Linear(256, 1)

    def forward(self, x):
        return self.out(self.conv(x).flatten(1)).squeeze(1)


# %% the training cell
pairs = list(zip(days, in_an_hour, strict=True))
dl = DataLoader(pairs, batch_size=24, shuffle=True, collate_fn=collate)
net = Forecaster()
opt = torch.optim.RMSprop(net.parameters(), lr=5e-4)
for epoch in range(2):
    se = []
    for x, y in dl:
        pred = net(x)
        loss = nn.functional.huber_loss(pred, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        se.append(((pred - y) ** 2).mean().item())
    print(f"RMSE {100 * np.sqrt(np.mean(se)):.1f} mg/dl")
