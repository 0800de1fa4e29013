# /// cell
# causes = ["checkpoint_save"]
# because = "weights and the optimizer's state are written after every second step"
# batch = 128
# warmup = 6
# cohort = "2026-11-22b"
#
# [[cure]]
# old = "save_every: int = 2"
# new = "save_every: int = 1000"
# ///
"""A surrogate of an antenna simulation: from twelve lengths of its wires the gain in 181 directions."""

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(71)


@dataclass
class Config:
    geometry: int = 12
    directions: int = 181
    width: int = 768
    depth: int = 4
    batch: int = 128
    steps: int = 240
    lr: float = 1e-3
    save_every: int = 2
    folder: str = tempfile.mkdtemp(prefix="antenna_")


def simulated(count, config):
    """Sums of a few waves stand in for the solver's answers."""
    wires = torch.rand(count, config.geometry) * 2 - 1
    angle = torch.linspace(0, torch.pi, config.directions)
    orders = torch.arange(1, config.geometry + 1)
    return wires, (wires @ torch.cos(orders[:, None] * angle)) / config.geometry**0.5


def surrogate(config):
    layers, width = [], config.geometry
    for _ in range(config.depth):
        layers += [nn.Linear(width, config.width), nn.SiLU()]
        width = config.width
    return nn.Sequential(*layers, nn.Linear(width, config.directions))


config = Config()
geometry, gain = simulated(20_000, config)

# %% the training cell
model = surrogate(config)
optimizer = torch.optim.Adam(model.parameters(), lr=config.lr, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
losses = []
for step in range(1, config.steps + 1):
    rows = torch.randint(0, len(geometry), (config.batch,))
    loss = nn.functional.huber_loss(model(geometry[rows]), gain[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.detach())
    if step % config.save_every == 0:
        torch.save(
            {
                "step": step,
                "config": asdict(config),
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
            },
            Path(config.folder) / "antenna.pt",
        )
