# /// cell
# cause = "straggler"
# because = "every eighth step rank 0 alone validates on 4,000 held-out seams, and rank 1 waits in its next all-reduce"
# cohort = "2026-11-25b"
# written_ms = 127.0
# without_ms = 37.5
#
# [[without]]
# old = "validate_every: int = 8"
# new = "validate_every: int = 1_000_000"
# ///
"""Ultrasound of weld seams, good or bad; the best averaged weights are kept."""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


@dataclass
class Options:
    """What can be set."""

    updates: int = 88
    batch: int = 64
    decay: float = 0.98
    validate_every: int = 8


def network() -> nn.Module:
    """Convolutions along the echo."""
    return nn.Sequential(
        nn.Conv1d(2, 32, 11, stride=2, padding=5), nn.SiLU(),
        nn.Conv1d(32, 64, 7, stride=2, padding=3), nn.SiLU(),
        nn.Conv1d(64, 64, 7, stride=2, padding=3), nn.SiLU(),
        nn.AdaptiveMaxPool1d(4), nn.Flatten(), nn.Linear(256, 2),
    )  # fmt: skip


class Trainer:
    """The network, its running average and the best of that."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.net = network()
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=2e-3)
        self.best = (float("inf"), None)
        generator = torch.Generator().manual_seed(1 + self.rank)
        self.echoes = torch.randn(2000, 2, 384, generator=generator)
        self.bad = (self.echoes[:, 0, 100:140].mean(1) > 0).long()
        generator = torch.Generator().manual_seed(77)
        self.held_out = torch.randn(4000, 2, 384, generator=generator)
        self.held_out_bad = (self.held_out[:, 0, 100:140].mean(1) > 0).long()

    def share_gradients(self) -> None:
        """Their mean over the ranks."""
        gradients = [parameter.grad for parameter in self.net.parameters()]
        flat = torch._utils._flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        flat.div_(self.world)
        for gradient, new in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(new)

    @torch.no_grad()
    def validate(self) -> None:
        """Keep the average if it is the best so far."""
        parts = zip(self.held_out.split(400), self.held_out_bad.split(400), strict=True)
        loss = sum(F.cross_entropy(self.average(echo), bad, reduction="sum").item() for echo, bad in parts)
        if loss < self.best[0]:
            self.best = (loss, copy.deepcopy(self.average.state_dict()))

    def fit(self) -> None:
        """All updates."""
        for update in range(1, self.options.updates + 1):
            rows = torch.randint(0, len(self.echoes), (self.options.batch,))
            self.optimizer.zero_grad()
            F.cross_entropy(self.net(self.echoes[rows]), self.bad[rows]).backward()
            self.share_gradients()
            self.optimizer.step()
            torch._foreach_lerp_(
                list(self.average.parameters()), [p.detach() for p in self.net.parameters()], 1 - self.options.decay
            )
            if self.rank == 0 and update % self.options.validate_every == 0:
                self.validate()


dist.init_process_group("gloo")
trainer = Trainer(Options())
trainer.fit()
if trainer.rank == 0:
    print(f"best summed loss {trainer.best[0]:.2f}")
dist.destroy_process_group()
