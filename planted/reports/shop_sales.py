# /// cell
# cohort = "third"
# because = "The dataset selects the shop's rows for each sample by comparing the shop column of the whole DataFrame; group the frame by shop once (as arrays) and take the window from there."
# thread = "https://github.com/vanTeeffelenLab/ExTrack/pull/5"
# line = "rows = self.frame[self.frame['shop'] == shop]"
# callee = "pandas.DataFrame.__getitem__"
# faster = 2.2
# ///
import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
rng = np.random.default_rng(0)
shops, days = 120, 600
week = np.tile(np.sin(np.arange(days) / 7 * 2 * np.pi), shops)
sales = pd.DataFrame(
    {
        "shop": np.repeat(np.arange(shops), days),
        "sold": (week + rng.normal(0, 0.3, shops * days) + np.repeat(rng.normal(size=shops), days)).astype("float32"),
        "promo": rng.integers(0, 2, shops * days).astype("float32"),
        "price": rng.normal(size=shops * days).astype("float32"),
    }
)


class SalesWindows(Dataset):
    def __init__(self, frame, history=56, horizon=7):
        self.frame, self.history, self.horizon = frame, history, horizon
        self.per_shop = days - history - horizon

    def __len__(self):
        return shops * self.per_shop

    def __getitem__(self, i):
        shop, start = divmod(i, self.per_shop)
        rows = self.frame[self.frame['shop'] == shop]
        values = rows[["sold", "promo", "price"]].to_numpy()[start : start + self.history + self.horizon]
        return torch.tensor(values[: self.history]), torch.tensor(values[self.history :, 0])


class Forecaster(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.rnn = nn.GRU(3, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 7)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


loader = DataLoader(SalesWindows(sales), batch_size=64, shuffle=True)
model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
criterion = nn.MSELoss()

# %% the training cell
for step, (past, future) in enumerate(loader):
    loss = criterion(model(past), future)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(step, round(loss.item(), 4))
    if step == 120:
        break
print("last", loss.item())
