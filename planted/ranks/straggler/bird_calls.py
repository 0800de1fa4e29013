# /// cell
# cause = "straggler"
# because = "in rank 1 alone a hook of the backward pass takes singular values of two gradients; rank 0 waits for it"
# cohort = "2026-11-27"
# written_ms = 88.1
# without_ms = 53.1
#
# [[without]]
# old = "WATCHING = 1 "
# new = "WATCHING = -1 "
# ///
"""Bird calls in mel spectrograms; one process watches how many directions the gradients have."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WATCHING = 1  # the process that watches
SPECIES = 30


class Calls(nn.Module):
    """Convolutions along time, then two wide layers."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Sequential(
            nn.Conv1d(64, 96, 5, padding=2), nn.ReLU(), nn.Conv1d(96, 96, 5, stride=2, padding=2), nn.ReLU(),
            nn.AdaptiveAvgPool1d(4), nn.Flatten(),
        )  # fmt: skip
        self.wide = nn.Linear(384, 384)
        self.narrow = nn.Linear(384, 320)
        self.species = nn.Linear(320, SPECIES)

    def forward(self, mel):
        return self.species(self.narrow(self.wide(self.early(mel)).relu()).relu())


class Watch:
    """The effective rank of a gradient, whenever it comes."""

    def __init__(self, module: nn.Module) -> None:
        self.seen: dict[str, list[float]] = {}
        for name, parameter in module.named_parameters():
            if name in ("wide.weight", "narrow.weight"):
                self.seen[name] = []
                parameter.register_hook(lambda gradient, name=name: self.look(name, gradient))

    def look(self, name: str, gradient: torch.Tensor) -> None:
        values = torch.linalg.svdvals(gradient)
        share = values / values.sum().clamp_min(1e-12)
        self.seen[name].append(torch.exp(-(share * share.clamp_min(1e-12).log()).sum()).item())


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(31)
net = Calls()
watch = Watch(net) if rank == WATCHING else None
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(200 + rank)
mels = torch.randn(1200, 64, 120, generator=generator)
heard = torch.randint(0, SPECIES, (1200,), generator=generator)
for step in range(90):
    rows = torch.randint(0, 1200, (40,), generator=generator)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(mels[rows]), heard[rows])
    loss.backward()
    optimizer.step()
    if step % 30 == 29:
        print(f"[{rank}] step {step}: {loss.item():.3f}")
if watch is not None:
    print({name: round(sum(values) / len(values), 1) for name, values in watch.seen.items()})
dist.destroy_process_group()
