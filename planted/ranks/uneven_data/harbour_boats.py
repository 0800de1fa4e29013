# /// cell
# cause = "uneven_data"
# because = "no DistributedSampler: rank 0 reads the harbour, 27 boats in an image, rank 1 the open sea, 2 in one"
# cohort = "2026-11-27"
# written_ms = 103.7
# without_ms = 57.7
#
# [[without]]
# old = 'FOLDERS = {"harbour": 27, "open_sea": 2}'
# new = 'FOLDERS = {"harbour": 15, "open_sea": 14}'
# ///
"""Boats seen from above. The second stage looks at each proposed boat of an image."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FOLDERS = {"harbour": 27, "open_sea": 2}  # boats in an image, about
PER_STEP = 4


class Folder(Dataset):
    """An image and the places of its boats."""

    def __init__(self, boats: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(180, 3, 96, 96, generator=generator)
        counts = torch.randint(max(1, boats - 1), boats + 2, (180,), generator=generator).tolist()
        self.corners = [torch.randint(0, 64, (count, 2), generator=generator) for count in counts]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.corners[index]


def crops(samples: list) -> tuple[Tensor, Tensor]:
    """All boats of all images."""
    pieces, kinds = [], []
    for image, corners in samples:
        for top, left in corners.tolist():
            pieces.append(image[:, top : top + 32, left : left + 32])
            kinds.append((top + left) % 6)
    return torch.stack(pieces), torch.tensor(kinds)


def second_stage() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(48, 64, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(256, 6),
    )  # fmt: skip


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = list(FOLDERS)[rank]
    torch.manual_seed(5)
    model = DistributedDataParallel(second_stage())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(Folder(FOLDERS[folder], rank), PER_STEP, shuffle=True, collate_fn=crops, drop_last=True)
    for epoch in range(2):
        for boats, kinds in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(boats), kinds)
            loss.backward()
            optimizer.step()
        print(f"{folder}: epoch {epoch}, {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
