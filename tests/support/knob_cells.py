"""Small training cells and traced runs, for tests of the knobs that take hold of models and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from msgspec import Struct, field
from torch import Tensor, nn

from gpulab.capture.recorder import Capture
from gpulab.knobs.knob import Knob, KnobEffects, Value
from gpulab.knobs.observation import Observation
from gpulab.knobs.observer import Observer, observe
from gpulab.run import Device, Run, Settings

CPU = Device("cpu", "CPU")
H100 = Device("cuda", "NVIDIA H100", 0, details={"compute_capability": "9.0"})
T4 = Device("cuda", "Tesla T4", 0, details={"compute_capability": "7.5"})


class Net(nn.Module):
    """A convolution, attention and linear layers; remembers which dtypes its layers gave."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(3, 8, 3, padding=1)
        self.project = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.convolve(x)).flatten(2).transpose(1, 2)
        q = self.project(x).unsqueeze(1)
        logits: Tensor = self.head(F.scaled_dot_product_attention(q, q, q).mean((1, 2)))
        return logits


class Cell(Struct):
    """A training cell: `run` trains for some steps and keeps the losses."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    after_backward: Callable[[], None] | None = None

    def run(self, steps: int = 6, batch: int = 4) -> None:
        criterion = nn.CrossEntropyLoss()
        data = torch.Generator().manual_seed(1)
        for _ in range(steps):
            x, y = torch.randn(batch, 3, 6, 6, generator=data), torch.randint(4, (batch,), generator=data)
            self.optimizer.zero_grad()
            loss = criterion(self.model(x), y)
            loss.backward()
            if self.after_backward is not None:
                self.after_backward()
            self.optimizer.step()
            self.losses.append(loss.item())

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def new_cell(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Cell:
    """The same each time."""
    torch.manual_seed(0)
    model = Net()
    return Cell(model, kind(model.parameters(), **({"lr": 1e-2} | options)))


def captured(
    code: Callable[[], object], *settings: tuple[Knob, Value], observed: bool = False, **options: Any
) -> tuple[Run, dict[str, KnobEffects], Observer | None]:
    """A captured run of the code under knobs: the run, what they did, and what was seen to be used."""
    capture = Capture(Settings(live=False, save=False, **options), "block", "loss.backward()")
    capture.start()
    try:
        with ExitStack() as undo:
            logs = {knob.name: undo.enter_context(knob.applied(value)) for knob, value in settings}
            seen = undo.enter_context(observe()) if observed else None
            code()
    finally:
        run, _ = capture.finish("completed")
        capture.close()
    return run, logs, seen


def traced(cell: Cell, *settings: tuple[Knob, Value]) -> tuple[Run, list[KnobEffects]]:
    """A captured run with a trace, knobs applied."""
    run, logs, _ = captured(cell.run, *settings, warmup=1)
    return run, list(logs.values())


def observation_of(cell: Cell) -> Observation:
    """What a run of the baseline is seen to use."""
    run, _, seen = captured(cell.run, observed=True, warmup=1)
    assert seen is not None
    return seen.observation(run)


def same(a: list[Tensor], b: list[Tensor], *, exactly: bool = False) -> bool:
    """Whether weights are equal, within float32's rounding or to the bit."""
    if exactly:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-6) for x, y in zip(a, b, strict=True))
