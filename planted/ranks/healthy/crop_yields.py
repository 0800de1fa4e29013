# /// cell
# cause = "healthy"
# because = "two micro-batches, the first under no_sync, in equal loaders; 0.4 MB of gradients behind much compute"
# cohort = "2026-11-27"
# written_ms = 0.0
# without_ms = 0.0
# clock = "exchange alone"
#
# [[without]]
# old = "    model = DistributedDataParallel(Fields(), gradient_as_bucket_view=True)\n"
# new = """
#     model = DistributedDataParallel(Fields(), gradient_as_bucket_view=True)
#     model.require_backward_grad_sync = False
# """
# ///
"""Yields of fields from a season of satellite images."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WEEKS, BANDS, SIDE = 6, 4, 24


class Fields(nn.Module):
    """Space and time at once, then only time."""

    def __init__(self) -> None:
        super().__init__()
        self.season = nn.Sequential(
            nn.Conv3d(BANDS, 24, 3, padding=1), nn.ReLU(), nn.MaxPool3d((1, 2, 2)),
            nn.Conv3d(24, 48, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d((WEEKS, 2, 2)),
        )  # fmt: skip
        self.yields = nn.Sequential(nn.Flatten(), nn.Linear(48 * WEEKS * 4, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, season):
        return self.yields(self.season(season)).squeeze(1)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    seasons = torch.randn(1024, BANDS, WEEKS, SIDE, SIDE)
    data = TensorDataset(seasons, seasons.mean((1, 2, 3, 4)) * 100)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(Fields(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (season, harvest) in enumerate(loader):
            last = number % 2 == 1
            with nullcontext() if last else model.no_sync():
                loss = nn.functional.l1_loss(model(season), harvest) / 2
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: {2 * loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
