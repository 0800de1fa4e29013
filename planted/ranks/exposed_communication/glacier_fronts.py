# /// cell
# cause = "exposed_communication"
# because = "gradients are accumulated over five micro-batches without no_sync: 13 MB are exchanged five times a step"
# cohort = "2026-11-27"
# written_ms = 194.2
# without_ms = 114.9
#
# [[without]]
# old = "            model.require_backward_grad_sync = True\n"
# new = "            model.require_backward_grad_sync = micro % MICRO_BATCHES == 0\n"
# ///
"""How far a glacier's front moves in a year, from radar profiles; five micro-batches are a step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MICRO_BATCHES = 5


def fronts(profiles: int = 2080) -> TensorDataset:
    """Noise with a slope in it."""
    generator = torch.Generator().manual_seed(4)
    slope = torch.randn(profiles, 1, generator=generator)
    depth = torch.linspace(-1, 1, 1024)
    return TensorDataset(slope * depth + torch.randn(profiles, 1024, generator=generator), slope)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    net = nn.Sequential(
        nn.Linear(1024, 1280), nn.GELU(), nn.Linear(1280, 1280), nn.GELU(), nn.Linear(1280, 256), nn.GELU(),
        nn.Linear(256, 1),
    )  # fmt: skip
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = fronts()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for micro, (profile, moved) in enumerate(loader, 1):
            model.require_backward_grad_sync = True
            loss = nn.functional.mse_loss(model(profile), moved) / MICRO_BATCHES
            loss.backward()
            if micro % MICRO_BATCHES == 0:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {MICRO_BATCHES * loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
