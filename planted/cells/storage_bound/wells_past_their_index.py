# /// cell
# causes = ["storage_bound"]
# because = "lower() around the column keeps the database from its index, so that it reads all rows for each well"
# also = ["cpu_preprocessing"]
# batch = 8
# cohort = "2026-11-23"
#
# [[cure]]
# old = "WHERE lower(well) = ?"
# new = "WHERE well = ?"
# ///
"""Groundwater: level in 30 days from the last 120, one LSTM for all wells."""

import sqlite3

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

# !cp /mnt/hydro/wells.db .   <- the original, 2.1 GB. Below: a small one with the same schema.
WELLS, DAYS = 160, 150

con = sqlite3.connect("wells.db")
con.executescript(
    """
    DROP TABLE IF EXISTS measurement;
    CREATE TABLE measurement (well TEXT, day INTEGER, level REAL, rain REAL, pumped REAL, note TEXT);
    CREATE INDEX by_well ON measurement (well, day);
    """
)
g = torch.Generator().manual_seed(11)
rain = torch.rand(DAYS, generator=g)
for day in range(DAYS):
    pumped = torch.rand(WELLS, generator=g)
    level = 3 + torch.randn(WELLS, generator=g) * 0.05 + rain[max(0, day - 9) : day + 1].mean()
    con.executemany(
        "INSERT INTO measurement VALUES (?, ?, ?, ?, ?, 'ok')",
        [(f"gw-{w:04d}", day, level[w].item(), rain[day].item(), pumped[w].item()) for w in range(WELLS)],
    )
con.commit()
con.close()


class WellData(Dataset):
    sql = "SELECT level, rain, pumped FROM measurement WHERE lower(well) = ? AND day BETWEEN ? AND ? ORDER BY day"

    def __init__(self, db, past=120, ahead=30):
        self.con = sqlite3.connect(db)
        self.past, self.ahead = past, ahead
        self.wells = [w for (w,) in self.con.execute("SELECT DISTINCT well FROM measurement")]

    def __len__(self):
        return len(self.wells) * 10

    def __getitem__(self, idx):
        well = self.wells[idx % len(self.wells)]
        rows = self.con.execute(self.sql, (well, 0, self.past + self.ahead - 1)).fetchall()
        t = torch.tensor(rows)
        return t[: self.past], t[self.past :, 0]


class Net(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.lstm = nn.LSTM(3, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 30)

    def forward(self, x):
        _, (h, _) = self.lstm(x[:, ::2])
        return self.fc(h[-1])


# %% the training cell
data = WellData("wells.db")
loader = DataLoader(data, batch_size=8, shuffle=True)
net = Net()
opt = torch.optim.Adam(net.parameters(), 1e-3, fused=True)
mae = nn.L1Loss()
for epoch in range(1):
    for i, (x, y) in enumerate(loader):
        loss = mae(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i % 25 == 0:
            print(f"{epoch}:{i:04d} mae={loss.item():.3f} m")
data.con.close()
