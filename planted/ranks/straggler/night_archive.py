# /// cell
# cause = "straggler"
# because = "the core of rank 1 also compresses last night's footage, so rank 1 has half a core and rank 0 waits"
# cohort = "2026-11-27"
# written_ms = 107.5
# without_ms = 58.7
#
# [[without]]
# old = "ARCHIVERS = {0: 0, 1: 1}"
# new = "ARCHIVERS = {0: 0, 1: 0}"
# ///
"""Foxes before a camera trap. Each process has a core of its own, or so the job script says."""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ARCHIVERS = {0: 0, 1: 1}  # other work on the core of each process
ARCHIVE = """
import os, sys, time, zlib
parent, until = int(sys.argv[1]), time.time() + 180
footage = bytes(range(256)) * 2048 + os.urandom(200_000)
while time.time() < until and os.getppid() == parent:
    zlib.compress(footage, 9)
"""


class Frames(nn.Module):
    """Five frames in a row as channels."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Sequential(
            nn.Conv2d(5, 24, 3, padding=1), nn.LeakyReLU(), nn.MaxPool2d(2),
            nn.Conv2d(24, 48, 3, padding=1), nn.LeakyReLU(), nn.MaxPool2d(2),
            nn.Conv2d(48, 64, 3, padding=1), nn.LeakyReLU(),
        )  # fmt: skip
        self.fox = nn.Linear(64, 2)

    def forward(self, x):
        return self.fox(self.frames(x).mean((2, 3)))


def main() -> None:
    """Pin, start what else runs there, train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    command = [sys.executable, "-c", ARCHIVE, str(os.getpid())]
    others = [subprocess.Popen(command) for _ in range(ARCHIVERS[rank])]
    torch.manual_seed(44)
    model = DistributedDataParallel(Frames())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    clips = torch.randn(512, 5, 48, 48, generator=generator)
    foxes = (clips.mean((1, 2, 3)) > 0).long()
    for step in range(70):
        rows = torch.randint(0, 512, (16,), generator=generator)
        loss = nn.functional.cross_entropy(model(clips[rows]), foxes[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 30 == 0:
            print(f"step {step}: {loss.item():.3f}")
    for other in others:
        other.kill()
        other.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
