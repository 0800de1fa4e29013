# /// cell
# cause = "uneven_data"
# because = "a step is a day of a city: about 4,600 trips in a step of rank 0, about 400 in one of rank 1"
# cohort = "2026-11-25b"
# written_ms = 63.3
# without_ms = 34.5
# clock = "processor"
#
# [[without]]
# old = '''
#     City("Chicago", 4600, 77),
#     City("Boulder", 400, 31),
# '''
# new = '''
#     City("Chicago", 2500, 77),
#     City("Boulder", 2500, 31),
# '''
# ///
"""Fares of taxis; a day of trips is a batch, since the figures of a day belong together."""

import itertools
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class City(NamedTuple):
    """One in each process."""

    name: str
    trips_per_day: int
    zones: int


CITIES = (
    City("Chicago", 4600, 77),
    City("Boulder", 400, 31),
)


class Days(IterableDataset):
    """The trips of each day, without end."""

    def __init__(self, city: City, seed: int) -> None:
        self.city = city
        self.seed = seed

    def __iter__(self):
        rng = np.random.default_rng(self.seed)
        while True:
            trips = rng.poisson(self.city.trips_per_day)
            zones = rng.integers(0, self.city.zones, (trips, 2))
            rest = rng.standard_normal((trips, 14), dtype=np.float32)
            fare = 3 + np.abs(zones[:, 0] - zones[:, 1]) / 10 + rest[:, 0]
            yield torch.from_numpy(zones), torch.from_numpy(rest), torch.from_numpy(fare.astype(np.float32))


class Fares(nn.Module):
    """Zones are embedded, the rest is taken as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.zones = nn.Embedding(80, 24)
        self.rest = nn.BatchNorm1d(14, track_running_stats=False)
        self.layers = nn.Sequential(
            nn.Linear(62, 256),
            nn.ELU(),
            nn.Linear(256, 256),
            nn.ELU(),
            nn.Linear(256, 128),
            nn.ELU(),
            nn.Linear(128, 1),
        )

    def forward(self, zones, rest):
        return self.layers(torch.cat([self.zones(zones).flatten(1), self.rest(rest)], 1)).squeeze(1)


def fit(days: int = 160) -> None:
    rank = dist.get_rank()
    torch.manual_seed(8)
    fares = DDP(Fares())
    opt = torch.optim.NAdam(fares.parameters(), lr=1e-3)
    loader = DataLoader(Days(CITIES[rank], seed=rank), batch_size=None)
    for day, (zones, rest, fare) in enumerate(itertools.islice(loader, days)):
        opt.zero_grad()
        loss = nn.functional.huber_loss(fares(zones, rest), fare)
        loss.backward()
        opt.step()
        if day % 40 == 0:
            print(f"{CITIES[rank].name}: day {day}, loss {loss.item():.3f}")


dist.init_process_group("gloo")
fit()
dist.destroy_process_group()
