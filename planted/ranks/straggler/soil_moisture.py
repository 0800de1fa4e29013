# /// cell
# cause = "straggler"
# because = "anomaly detection of autograd is on in rank 0 only: its forward and backward are slower, and rank 1 waits"
# cohort = "2026-11-25b"
# written_ms = 160.8
# without_ms = 47.2
#
# [[without]]
# old = "CHECKED_RANKS = (0,)"
# new = "CHECKED_RANKS = ()"
# ///
"""Soil moisture from weather, day by day: a cell of our own, unrolled over the season."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DAYS, FORCING, LAYERS = 90, 9, 32
CHECKED_RANKS = (0,)  # one is enough to find out where the NaN of last week came from


class Bucket(nn.Module):
    """A leaky bucket with learned rates; one day."""

    def __init__(self) -> None:
        super().__init__()
        self.inflow = nn.Linear(FORCING + LAYERS, LAYERS)
        self.drain = nn.Linear(FORCING + LAYERS, LAYERS)

    def forward(self, weather, water):
        both = torch.cat([weather, water], dim=1)
        kept = torch.sigmoid(self.drain(both))
        gained = nn.functional.softplus(self.inflow(both))
        water = kept * water + (1 - kept) * gained
        return water / (1 + 0.01 * water.abs())


class Season(nn.Module):
    """All days, and the moisture that a probe would read."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket = Bucket()
        self.probe = nn.Linear(LAYERS, 1)

    def forward(self, weather):
        water = weather.new_zeros(weather.shape[0], LAYERS)
        readings = []
        for day in weather.unbind(1):
            water = self.bucket(day, water)
            readings.append(self.probe(water))
        return torch.cat(readings, dim=1)


def main() -> None:
    """Fit the season of some fields."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(12)
    torch.autograd.set_detect_anomaly(rank in CHECKED_RANKS)
    model = DistributedDataParallel(Season())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(40 + rank)
    fields = torch.randn(600, DAYS, FORCING, generator=generator)
    moisture = fields[..., 0].cumsum(1) / torch.arange(1, DAYS + 1)
    for update in range(100):
        chosen = torch.randperm(len(fields), generator=generator)[:16]
        loss = nn.functional.smooth_l1_loss(model(fields[chosen]), moisture[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and update % 20 == 0:
            print(f"update {update}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
