# /// cell
# causes = ["cpu_preprocessing"]
# because = "a row is taken out of the data frame, its time parsed and its way worked out, trip by trip"
# batch = 96
# warmup = 6
# cohort = "2026-11-22c"
#
# [[cure]]
# old = "        self.df = df\n"
# new = '''
#         self.df = df
#         called = pd.to_datetime(df["called_at"], format="%d.%m.%Y %H:%M").dt
#         x = self.features(called, *(df[name].to_numpy() for name in COLUMNS))
#         x = np.stack([np.asarray(column, dtype=np.float32) for column in x], axis=1)
#         self.x, self.zone = torch.from_numpy(x), torch.from_numpy(df.zone.to_numpy())
#         self.minutes = torch.from_numpy(df.minutes.to_numpy(dtype=np.float32))
# '''
#
# [[cure]]
# old = "float(passengers)]"
# new = "passengers]"
#
# [[cure]]
# old = '''
#         row = self.df.iloc[idx]
#         called = datetime.strptime(row["called_at"], "%d.%m.%Y %H:%M")
#         x = self.features(called, *row[COLUMNS])
#         return torch.tensor(x, dtype=torch.float32), torch.tensor(row.zone), torch.tensor(row.minutes).float()
# '''
# new = '''
#         return self.x[idx], self.zone[idx], self.minutes[idx]
# '''
#
# [[cure]]
# old = "called.weekday()"
# new = "called.weekday"
# ///
"""When does the taxi arrive? Trips in a data frame, a few features of each, and embeddings of the zones."""

from datetime import datetime

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(1)
rng = np.random.default_rng(1)

# %% as exported from the dispatcher
n = 12_000
trips = pd.DataFrame(
    {
        "called_at": (
            pd.Timestamp("2023-03-01") + pd.to_timedelta(rng.integers(0, 60 * 24 * 90, n), unit="min")
        ).strftime("%d.%m.%Y %H:%M"),
        "from_lat": rng.normal(52.52, 0.05, n),
        "from_lon": rng.normal(13.40, 0.08, n),
        "to_lat": rng.normal(52.52, 0.05, n),
        "to_lon": rng.normal(13.40, 0.08, n),
        "zone": rng.integers(0, 300, n),
        "passengers": rng.integers(1, 5, n),
    }
)
trips["minutes"] = 6 + 400 * np.hypot(
    trips.from_lat - trips.to_lat, 0.6 * (trips.from_lon - trips.to_lon)
) * rng.uniform(0.8, 1.2, n)


# %% dataset and model
COLUMNS = ["from_lat", "from_lon", "to_lat", "to_lon", "passengers"]


class Trips(Dataset):
    def __init__(self, df):
        self.df = df

    def __len__(self):
        return len(self.df)

    def features(self, called, lat1, lon1, lat2, lon2, passengers):
        hour = 2 * np.pi * (called.hour + called.minute / 60) / 24
        day = 2 * np.pi * called.weekday() / 7
        a, b = np.radians(lat1), np.radians(lat2)
        east = np.radians(lon2 - lon1)
        half = np.sin((b - a) / 2) ** 2 + np.cos(a) * np.cos(b) * np.sin(east / 2) ** 2
        km = 2 * 6371 * np.arcsin(np.sqrt(half))
        bearing = np.arctan2(np.sin(east) * np.cos(b), np.cos(a) * np.sin(b) - np.sin(a) * np.cos(b) * np.cos(east))
        return [np.sin(hour), np.cos(hour), np.sin(day), np.cos(day), km / 10, bearing, float(passengers)]

    def __getitem__(self, idx):
        row = self.df.iloc[idx]
        called = datetime.strptime(row["called_at"], "%d.%m.%Y %H:%M")
        x = self.features(called, *row[COLUMNS])
        return torch.tensor(x, dtype=torch.float32), torch.tensor(row.zone), torch.tensor(row.minutes).float()


class Arrival(nn.Module):
    def __init__(self):
        super().__init__()
        self.zone = nn.Embedding(300, 32)
        self.mlp = nn.Sequential(
            nn.Linear(39, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1024),
            nn.ReLU(),
            nn.Linear(1024, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
        )

    def forward(self, x, zone):
        return self.mlp(torch.cat([x, self.zone(zone)], dim=1))[:, 0]


ds = Trips(trips)
net = Arrival()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-2, fused=True)

# %% the training cell
dl = DataLoader(ds, batch_size=96, shuffle=True, drop_last=True)
for epoch in range(1):
    for step, (x, zone, minutes) in enumerate(dl):
        pred = net(x, zone)
        loss = nn.functional.huber_loss(pred, minutes)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            print(f"{epoch}/{step}: {loss.item():.2f} min")
