# /// cell
# causes = ["storage_bound"]
# because = "one worker makes two requests of 2.5 ms for each window, which is five times as long as a step"
# batch = 16
# steps = 32
# warmup = 8
# cohort = "2026-11-22b"
# looked_at = true
#
# [[cure]]
# old = "num_workers=1, persistent_workers=True"
# new = "num_workers=4, persistent_workers=True"
# ///
"""Tomorrow's level of a river from three days of rain and level, which gauges tell by their web service."""

import json
import math
import random
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(21)
random.seed(21)


@dataclass
class Options:
    hours: int = 72
    ahead: int = 24
    batch: int = 16
    hidden: int = 96
    epochs: int = 4
    rate: float = 2e-3


class GaugeService:
    """What `GET /gauges/NAME?from=&to=` would answer."""

    round_trip = 0.0025

    def __init__(self, length):
        level, self.series = 2.0, {"rain": [], "level": []}
        for hour in range(length):
            rain = max(0.0, random.gauss(math.sin(hour / 90), 1.0))
            level += 0.06 * rain - 0.03 * (level - 1.0)
            self.series["rain"].append(round(rain, 3))
            self.series["level"].append(round(level, 3))

    def get(self, gauge, start, stop):
        time.sleep(self.round_trip)
        return json.dumps({"gauge": gauge, "values": self.series[gauge][start:stop]})


class Windows(Dataset):
    def __init__(self, service, count, options):
        self.service, self.count, self.options = service, count, options

    def __len__(self):
        return self.count

    def __getitem__(self, start):
        now = start + self.options.hours
        rain = json.loads(self.service.get("rain", start, now))["values"]
        level = json.loads(self.service.get("level", start, now + self.options.ahead))["values"]
        seen = torch.tensor([rain, level[: self.options.hours]]).T
        return seen, torch.tensor(level[self.options.hours :])


class Forecaster(nn.Module):
    def __init__(self, hidden, ahead):
        super().__init__()
        self.memory = nn.GRU(2, hidden, batch_first=True)
        self.tell = nn.Linear(hidden, ahead)

    def forward(self, seen):
        _, last = self.memory(seen)
        return self.tell(last[-1]) + seen[:, -1:, 1]


options = Options()
windows = Windows(GaugeService(1100), 960, options)

# %% the training cell
loader = DataLoader(windows, options.batch, shuffle=True, num_workers=1, persistent_workers=True)
forecaster = Forecaster(options.hidden, options.ahead)
adam = torch.optim.Adam(forecaster.parameters(), lr=options.rate, fused=True)
for epoch in range(options.epochs):
    total = torch.zeros(())
    for seen, coming in loader:
        loss = nn.functional.smooth_l1_loss(forecaster(seen), coming)
        adam.zero_grad()
        loss.backward()
        adam.step()
        total += loss.detach()
    print(f"epoch {epoch}: {total.item() / len(loader):.4f}")
