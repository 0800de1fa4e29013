# /// cell
# cause = "uneven_data"
# because = "rows without a label are dropped before the model: of 128 rank 0 keeps all, rank 1 about one in sixteen"
# cohort = "2026-11-25a"
# written_ms = 146.5
# without_ms = 53.9
# clock = "processor"
#
# [[without]]
# old = "LABELLED = (1.0, 0.06)"
# new = "LABELLED = (0.53, 0.53)"
# ///
"""Images of leaves; where nobody has looked at one its label is -1, and the loop leaves it out."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

LABELLED = (1.0, 0.06)  # by file; each rank reads one


def leaves(file: int) -> TensorDataset:
    """The images and labels of a file."""
    generator = torch.Generator().manual_seed(file)
    images = torch.randn(1536, 3, 24, 24, generator=generator)
    species = torch.randint(0, 12, (1536,), generator=generator)
    species[torch.rand(1536, generator=generator) > LABELLED[file]] = -1
    return TensorDataset(images, species)


def main() -> None:
    """Train on the leaves that have a name."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 48, 3, padding=1, stride=2), nn.ReLU(),
        nn.Conv2d(48, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 12),
    )  # fmt: skip
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(leaves(rank), batch_size=128, shuffle=True)
    for epoch in range(10):
        for images, species in loader:
            labelled = species >= 0
            images, species = images[labelled], species[labelled]
            loss = nn.functional.cross_entropy(model(images), species)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
