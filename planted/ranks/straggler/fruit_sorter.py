# /// cell
# cause = "straggler"
# because = "rank 1 lacks the fast routine, so its augmentation shifts rows in a Python loop; as many images in both"
# cohort = "2026-11-27"
# written_ms = 99.5
# without_ms = 69.4
#
# [[without]]
# old = "FAST_ROUTINE = (True, False)"
# new = "FAST_ROUTINE = (True, True)"
# ///
"""Pears and apples on a belt, sound or bruised. The belt shakes, and so do the pictures that we train on."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAST_ROUTINE = (True, False)  # by node: the second one's image has an old library
SIDE = 72


def shaken(picture: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Each row is moved by its own shift."""
    columns = (np.arange(SIDE)[None, :] - shifts[:, None]) % SIDE
    return np.take_along_axis(picture, columns[None], axis=2)


def shaken_slowly(picture: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """The same, for where the other does not work."""
    moved = np.empty_like(picture)
    for row in range(SIDE):
        moved[:, row] = np.roll(picture[:, row], shifts[row], axis=-1)
    return moved


class Belt(Dataset):
    """Pictures of the belt."""

    def __init__(self, fast: bool, count: int = 1024) -> None:
        rng = np.random.default_rng(17)
        self.pictures = rng.random((count, 3, SIDE, SIDE), dtype=np.float32)
        self.bruised = rng.integers(0, 4, count)
        self.shake = shaken if fast else shaken_slowly
        self.rng = np.random.default_rng()

    def __len__(self) -> int:
        return len(self.bruised)

    def __getitem__(self, index):
        shifts = self.rng.integers(-4, 5, SIDE)
        picture = self.shake(self.pictures[index], shifts)
        return torch.from_numpy(picture) - 0.5, int(self.bruised[index])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 48, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(432, 4),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    belt = Belt(FAST_ROUTINE[rank])
    sampler = DistributedSampler(belt)
    loader = DataLoader(belt, batch_size=32, sampler=sampler)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for pictures, bruised in loader:
            loss = nn.functional.cross_entropy(model(pictures), bruised)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
