"""Capture, accounting and the report's picture on a real NVIDIA GPU. Needs no IPython."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import gpulab  # noqa: E402
from gpulab.analysis.breakdown import PARTS  # noqa: E402
from gpulab.analysis.integrity import CLOCK_TOLERANCE_NS  # noqa: E402
from gpulab.run import Category, Phase, Run, Timeline  # noqa: E402

pytestmark = pytest.mark.gpu


def training(steps: int, width: int = 2048) -> Callable[[], None]:
    """A loop over a DataLoader whose device time per step is a few milliseconds."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)), nn.Linear(width, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(steps * 64, width), torch.randint(0, 10, (steps * 64,)))
    loader = DataLoader(data, batch_size=64, pin_memory=True)

    def run() -> None:
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


def profiled(steps: int = 60) -> Run:
    work = training(steps)
    with gpulab.profile("gpu", device="cuda", show=False) as p:
        work()
    p.run.check()
    return p.run


def rows(timeline: Timeline, *categories: Category) -> np.ndarray:
    return np.flatnonzero(np.isin(timeline.category, [int(c) for c in categories]))


def launches(timeline: Timeline) -> np.ndarray:
    """Rows of the calls that start one kernel each."""
    starting = [i for i, name in enumerate(timeline.names) if "Launch" in name and "Graph" not in name]
    calls = rows(timeline, Category.CUDA_RUNTIME, Category.CUDA_DRIVER)
    return calls[np.isin(timeline.name_id[calls], starting)]


def trace_of(run: Run) -> Timeline:
    assert run.timeline is not None, [f"{m.what}: {m.reason}" for m in run.missing]
    return run.timeline


def count_of(run: Run, name: str) -> int:
    """What gpulab says about the trace itself."""
    trust = gpulab.report(run).facts.integrity
    assert trust is not None
    return next(check.count for check in trust.checks if check.name == name)


@pytest.fixture(scope="module")
def five_runs() -> list[Run]:
    """Five profiled runs in this one process."""
    return [profiled() for _ in range(5)]


def test_every_launch_has_its_kernel_or_is_counted(five_runs: list[Run]) -> None:
    for number, run in enumerate(five_runs, 1):
        timeline = trace_of(run)
        came_back = set(timeline.correlation[rows(timeline, Category.KERNEL)].tolist())
        assert came_back, f"run {number}: kernels were launched and none came back"
        launched = [c for c in timeline.correlation[launches(timeline)].tolist() if c > 0]
        lost = sum(c not in came_back for c in launched)
        assert launched and count_of(run, "launches_without_kernels") == lost, f"run {number}"
        assert lost <= 0.02 * len(launched), f"run {number}: {lost} of {len(launched)} launches have no kernel"


def test_every_kernel_has_its_launch_and_begins_after_it(five_runs: list[Run]) -> None:
    for number, run in enumerate(five_runs, 1):
        timeline = trace_of(run)
        calls = rows(timeline, Category.CUDA_RUNTIME, Category.CUDA_DRIVER)
        calls = calls[timeline.correlation[calls] > 0]  # 0 is none
        begun = dict(zip(timeline.correlation[calls].tolist(), timeline.start_ns[calls].tolist(), strict=True))
        kernels = rows(timeline, Category.KERNEL)
        pairs = zip(timeline.correlation[kernels].tolist(), timeline.start_ns[kernels].tolist(), strict=True)
        delays_ns = [start - begun[c] if c in begun else None for c, start in pairs]
        assert None not in delays_ns, f"run {number}: {delays_ns.count(None)} kernels have no launch"
        early = [d for d in delays_ns if d is not None and d < -CLOCK_TOLERANCE_NS]
        assert count_of(run, "kernels_before_launch") >= len(early), "gpulab sees them as well"
        assert not early, f"run {number}: {len(early)} kernels begin before their launch, worst {min(early)} ns"


def test_phases_and_accounting() -> None:
    run = profiled()
    phases = run.steps.phase.tolist()
    assert len(run.steps) == 60
    assert phases.index(Phase.MEASURED) < phases.index(Phase.TRACED), "throughput comes before the profiler"
    with_report = gpulab.report(run)
    account = with_report.facts.breakdown
    assert account is not None and account.busy_fraction is not None
    assert account.busy_fraction >= account.kernel_busy_fraction > 0  # type: ignore[operator]
    for step in account.steps:
        assert set(step.parts_ns) == set(PARTS)
        assert sum(step.parts_ns.values()) == step.end_ns - step.start_ns
    assert with_report.facts.kernels, "no kernel in the table"


def test_steps_and_kernels_share_one_clock() -> None:
    """The kernels of a profiled step lie within it or, run ahead of by the host, soon after: never before its start."""
    run = profiled()
    timeline = trace_of(run)
    first = run.steps.start_ns[run.steps.number == run.traced_numbers[0]][0]
    kernels = rows(timeline, Category.KERNEL)
    assert (timeline.start_ns[kernels] >= first - 50_000).all()


def test_both_step_times_and_the_cost_of_measuring_are_reported() -> None:
    facts = gpulab.report(profiled()).facts
    assert facts.step_us is not None and facts.traced_step_us is not None
    assert facts.observer_us_per_step is not None


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    run = profiled()
    picture = gpulab.report(run).png()
    assert picture.startswith(b"\x89PNG")
    assert run.memory.peak_allocated_bytes and run.memory.peak_allocated_bytes > 0
    (tmp_path / "report.png").write_bytes(picture)
