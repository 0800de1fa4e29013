# /// cell
# cause = "small_collectives"
# because = "16 normalizations take mean and variance over the ranks, in both passes: 64 exchanges of 0.3 kB a step"
# cohort = "2026-11-25b"
# written_ms = 145.2
# without_ms = 11.8
#
# [[without]]
# old = "    return all_reduce(tensor) / dist.get_world_size()\n"
# new = "    return tensor\n"
# ///
"""Vowels from frames of speech; batches are small, so batch normalization is over the batches of all processes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce

CHANNELS, DEPTH = 80, 16


def mean_of_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """With a gradient."""
    return all_reduce(tensor) / dist.get_world_size()


class JointNorm(nn.Module):
    """BatchNorm1d whose batch is that of all processes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        centred = x - mean_of_ranks(x.mean(0))
        variance = mean_of_ranks(centred.square().mean(0))
        return centred * (variance + 1e-5).rsqrt() * self.weight + self.bias


class Layer(nn.Module):
    """Linear, norm, activation, and the way past them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(CHANNELS, CHANNELS, bias=False)
        self.norm = JointNorm(CHANNELS)

    def forward(self, x):
        return x + torch.relu(self.norm(self.linear(x)))


class Vowels(nn.Sequential):
    """All layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(26, CHANNELS), *(Layer() for _ in range(DEPTH)), nn.Linear(CHANNELS, 11))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(13)
    model = nn.parallel.DistributedDataParallel(Vowels())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(rank)
    frames = torch.randn(6000, 26, generator=generator)
    vowels = frames[:, :11].argmax(1)
    right = 0
    for number, rows in enumerate(torch.randperm(6000, generator=generator).split(60)):
        logits = model(frames[rows])
        loss = nn.functional.cross_entropy(logits, vowels[rows], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right += (logits.argmax(1) == vowels[rows]).sum().item()
        if number % 20 == 19 and rank == 0:
            print(f"after {number + 1}: {right / 60 / (number + 1):.1%}")
    dist.destroy_process_group()


main()
