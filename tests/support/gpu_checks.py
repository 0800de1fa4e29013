"""What the tests in tests/gpu measure with and look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gpulab
from gpulab.knobs.fused_optimizer import FUSED_OPTIMIZER
from gpulab.run import Category, Run, Timeline
from gpulab.timeline.labels import labels


def profiled() -> Run:
    """One run over a DataLoader, a few milliseconds per step on a GPU.

    It is not saved: fixtures of a module run before the test's own store is set.
    """
    steps, width = 60, 2048
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)), nn.Linear(width, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(steps * 64, width), torch.randint(0, 10, (steps * 64,)))
    loader = DataLoader(data, batch_size=64, pin_memory=True)
    with gpulab.profile("gpu", device="cuda", show=False, save=False) as p:
        for batch in loader:
            x, y = (tensor.to("cuda", non_blocking=True) for tensor in batch)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    p.run.check()
    return p.run


def rows(timeline: Timeline, *categories: Category) -> np.ndarray:
    """The rows of these categories."""
    return np.flatnonzero(np.isin(timeline.category, categories))


def first_step_ns(timeline: Timeline) -> int:
    """Where the first profiled step begins. What was launched before it may be lost: CUPTI loses a session's head."""
    marks = np.flatnonzero(
        (timeline.category == Category.USER_ANNOTATION) & labels(timeline).named(lambda n: n[:13] == "ProfilerStep#")
    )
    return int(timeline.start_ns[marks].min())


def calls(timeline: Timeline) -> np.ndarray:
    """Rows of the calls of CUDA that the profiled steps have made."""
    chosen = rows(timeline, Category.CUDA_RUNTIME, Category.CUDA_DRIVER)
    profiled: np.ndarray = chosen[timeline.start_ns[chosen] >= first_step_ns(timeline)]
    return profiled


def launches(timeline: Timeline) -> np.ndarray:
    """Rows of the calls of the profiled steps that start one kernel each."""
    starting = labels(timeline).named(lambda name: "Launch" in name and "Graph" not in name)
    within = calls(timeline)
    starts: np.ndarray = within[starting[within]]
    return starts


def lost_launches(timeline: Timeline) -> tuple[int, int]:
    """Launches of the profiled steps whose kernel did not come back, and all of them."""
    launched = timeline.correlation[launches(timeline)]
    launched = launched[launched > 0]
    came_back = timeline.correlation[rows(timeline, Category.KERNEL)]
    return int((~np.isin(launched, came_back)).sum()), len(launched)


def kernels(timeline: Timeline) -> np.ndarray:
    """Rows of the kernels that the profiled steps have launched, and of those whose launch is not in the trace."""
    chosen = rows(timeline, Category.KERNEL)
    before = rows(timeline, Category.CUDA_RUNTIME, Category.CUDA_DRIVER)
    before = before[timeline.start_ns[before] < first_step_ns(timeline)]
    return chosen[~np.isin(timeline.correlation[chosen], timeline.correlation[before])]


def delays_ns(timeline: Timeline) -> list[int | None]:
    """How long after its launch each kernel of the profiled steps begins; None for one without a launch."""
    within = calls(timeline)
    begun = dict(zip(timeline.correlation[within].tolist(), timeline.start_ns[within].tolist(), strict=True))
    begun.pop(0, None)  # 0 is none
    pairs = zip(
        *(column[kernels(timeline)].tolist() for column in (timeline.correlation, timeline.start_ns)), strict=True
    )
    return [start - begun[c] if c in begun else None for c, start in pairs]


class Net(nn.Module):
    """A convolution, an attention and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(64, 256, 3, padding=1)
        self.project = nn.Linear(256, 512)
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.convolve(x)).flatten(2).transpose(1, 2)
        q = self.project(x).unflatten(2, (8, 64)).transpose(1, 2)
        logits: Tensor = self.head(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2).mean(1))
        return logits


def convolutions() -> nn.Module:
    """Nothing but a convolution: cuDNN may use TF32 for it without being asked."""
    return nn.Sequential(nn.Conv2d(64, 10, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def products() -> nn.Module:
    """Nothing but linear layers: PyTorch uses no TF32 for them unless asked."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * 16 * 16, 512), nn.ReLU(), nn.Linear(512, 10))


class Cell:
    """A training whose start and whose one batch are the same in every cell."""

    def __init__(self, network: Callable[[], nn.Module] = Net) -> None:
        torch.manual_seed(0)
        self.model = network().cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(16, 64, 16, 16).cuda()
        self.y = torch.zeros(16, dtype=torch.long, device="cuda")

    def run(self, steps: int = 8) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(self.x), self.y).backward()
            self.optimizer.step()


def switched_and_plain(*, fused: bool) -> tuple[Cell, Cell]:
    """Two cells after four steps: in one of them two steps were taken with the other kind of AdamW."""
    cell, plain = Cell(), Cell()
    for c in (cell, plain):
        c.optimizer = torch.optim.AdamW(c.model.parameters(), fused=fused)
        c.run(2)
    with FUSED_OPTIMIZER.applied(not fused) as log:
        cell.run(2)
    assert log.counts == {"optimizers": 1}
    plain.run(2)
    return cell, plain


def apart_fraction(cells: Sequence[Cell], tolerance: float = 1e-5) -> float:
    """The share of weights that differ. A few do: AdamW makes whole steps of gradients that are only rounding."""
    weights = [torch.cat([p.detach().flatten() for p in cell.model.parameters()]) for cell in cells]
    return float(((weights[0] - weights[1]).abs() > tolerance).float().mean())


def product_error() -> float:
    """The relative error of a float32 matrix product: about 1e-7 in float32, 1e-4 with TF32."""
    torch.manual_seed(0)
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    exact = a.double() @ b.double()
    return float(((a.cuda() @ b.cuda()).cpu().double() - exact).norm() / exact.norm())
