# /// cell
# causes = ["cpu_preprocessing"]
# because = "for each batch pandas applies a function of distances and dates to each of its rows"
# batch = 128
# cohort = "2026-11-23"
# looked_at = true
#
# [[cure]]
# old = '''
#         feats = rows.apply(engineer, axis=1, result_type="expand")
# '''
# new = '''
#         feats = engineered.loc[rows.index]
# '''
#
# [[cure]]
# old = '''
# def batches(frame, size):
# '''
# new = '''
# engineered = sales.apply(engineer, axis=1, result_type="expand")
#
#
# def batches(frame, size):
# '''
# ///
# Flat prices — NN instead of the gradient boosting from last quarter

import math

import numpy as np
import pandas as pd
import torch
from torch import nn

rnd = np.random.default_rng(2024)
N = 6000
sales = pd.DataFrame(
    {
        "lat": 52.52 + rnd.normal(0, 0.06, N),
        "lon": 13.40 + rnd.normal(0, 0.09, N),
        "sqm": rnd.gamma(6, 12, N),
        "floor": rnd.integers(0, 6, N),
        "built": rnd.integers(1890, 2022, N),
        "sold": pd.to_datetime("2019-01-01") + pd.to_timedelta(rnd.integers(0, 1800, N), unit="D"),
    }
)
sales["price"] = sales.sqm * (6000 - 9000 * np.hypot(sales.lat - 52.52, sales.lon - 13.40)) * rnd.normal(1, 0.08, N)

STATIONS = {"Hbf": (52.525, 13.369), "Ostkreuz": (52.503, 13.469), "Zoo": (52.507, 13.332), "Tegel": (52.589, 13.283)}


def haversine(lat1, lon1, lat2, lon2):
    p1, p2 = math.radians(lat1), math.radians(lat2)
    a = math.sin((p2 - p1) / 2) ** 2 + math.cos(p1) * math.cos(p2) * math.sin(math.radians(lon2 - lon1) / 2) ** 2
    return 2 * 6371 * math.asin(math.sqrt(a))


def engineer(row):
    out = {f"km_{name}": haversine(row.lat, row.lon, *where) for name, where in STATIONS.items()}
    out["km_nearest"] = min(out.values())
    out["age"] = (row.sold.year - row.built) / 100
    out["old_building"] = float(row.built < 1918)
    out["season_sin"] = math.sin(2 * math.pi * row.sold.dayofyear / 365)
    out["season_cos"] = math.cos(2 * math.pi * row.sold.dayofyear / 365)
    out["log_sqm"] = math.log(row.sqm)
    out["floor"] = row.floor / 5
    return out


def batches(frame, size):
    """yields X, y; replacement is fine for SGD"""
    while True:
        rows = frame.sample(n=size)
        feats = rows.apply(engineer, axis=1, result_type="expand")
        yield (
            torch.tensor(feats.to_numpy(), dtype=torch.float32),
            torch.tensor(np.log(rows.price.to_numpy()), dtype=torch.float32),
        )


# %% the training cell
torch.manual_seed(2024)
mlp = nn.Sequential(nn.Linear(11, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 1))
opt = torch.optim.AdamW(mlp.parameters(), lr=2e-3, fused=True)
with torch.no_grad():
    mlp[-1].bias.fill_(12.5)

stream = batches(sales, 128)
for i in range(150):
    X, y = next(stream)
    loss = nn.functional.l1_loss(mlp(X).squeeze(-1), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if (i + 1) % 50 == 0:
        print(f"{i + 1:>4} | mean abs log error {loss:.3f}")
