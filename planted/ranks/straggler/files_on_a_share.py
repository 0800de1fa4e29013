# /// cell
# cause = "straggler"
# because = "rank 1 reads its files from a slow share, 4 ms for each of 16 files in a step; rank 0 has a local disk"
# cohort = "2026-11-25a"
# written_ms = 142.6
# without_ms = 90.8
#
# [[without]]
# old = "LATENCY_S = {0: 0.0, 1: 0.004}"
# new = "LATENCY_S = {0: 0.0, 1: 0.0}"
# ///
"""Seismic records in one file each; the second node mounts the share over a slow line."""

import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

LATENCY_S = {0: 0.0, 1: 0.004}  # until the share hands a file over


class Records(Dataset):
    """One file for each record."""

    def __init__(self, folder: Path, latency_s: float) -> None:
        self.files = sorted(folder.glob("*.npy"))
        self.latency_s = latency_s

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index):
        time.sleep(self.latency_s)
        record = np.load(self.files[index])
        return torch.from_numpy(record), index % 4


def write_records(folder: Path, seed: int) -> None:
    """What the network of stations would have left there."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for number in range(320):
        np.save(folder / f"{number:04}.npy", rng.standard_normal((3, 1024), dtype=np.float32))


def main() -> None:
    """Train on this node's files."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    folder = Path("records", str(rank))
    write_records(folder, rank)
    net = nn.Sequential(
        nn.Conv1d(3, 48, 9, stride=2, padding=4), nn.ReLU(), nn.Conv1d(48, 64, 9, stride=2, padding=4), nn.ReLU(),
        nn.Conv1d(64, 64, 9, padding=4), nn.ReLU(), nn.AdaptiveAvgPool1d(8), nn.Flatten(), nn.Linear(512, 4),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(Records(folder, LATENCY_S[rank]), batch_size=16, shuffle=True)
    for epoch in range(6):
        for waves, labels in loader:
            loss = nn.functional.cross_entropy(model(waves), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
