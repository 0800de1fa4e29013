# /// cell
# cause = "healthy"
# because = "scikit-learn's digits in equal shards, 0.7 MB of gradients behind a step of much compute"
# cohort = "2026-11-25a"
# written_ms = 167.8
# without_ms = 166.5
# clock = "exchange alone"
#
# [[without]]
# old = "    model = DistributedDataParallel(net)\n"
# new = "    model = DistributedDataParallel(net)\n    model.require_backward_grad_sync = False\n"
# ///
"""Handwritten digits, as the documentation of DistributedDataParallel would have it."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    """Train, and tell the loss of all ranks after each epoch."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:1792, None] / 16
    data = TensorDataset(images, torch.tensor(digits.target)[:1792])
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=128, sampler=sampler)
    net = nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 96, 3, padding=1), nn.ReLU(),
        nn.Conv2d(96, 96, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(384, 10),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(14):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
