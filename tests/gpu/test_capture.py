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
from gpulab.run import Category, Phase, Run, Timeline  # noqa: E402

pytestmark = pytest.mark.gpu

LAUNCHING = (Category.CUDA_RUNTIME, Category.CUDA_DRIVER)


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


def test_kernels_match_their_launches_over_five_runs_in_one_process() -> None:
    for attempt in range(5):
        timeline = profiled().timeline
        assert timeline is not None, "no trace"
        launches = rows(timeline, *LAUNCHING)
        kernels = rows(timeline, Category.KERNEL)
        assert len(kernels), "CUDA work was launched and no kernel came back"
        launch_start = dict(
            zip(timeline.correlation[launches].tolist(), timeline.start_ns[launches].tolist(), strict=True)
        )
        without = [k for k in timeline.correlation[kernels].tolist() if k not in launch_start]
        early = [
            int(timeline.start_ns[k]) - launch_start[int(timeline.correlation[k])]
            for k in kernels
            if int(timeline.correlation[k]) in launch_start
            and timeline.start_ns[k] < launch_start[int(timeline.correlation[k])]
        ]
        assert not without, f"session {attempt + 1}: {len(without)} of {len(kernels)} kernels have no launch"
        assert not early, (
            f"session {attempt + 1}: {len(early)} kernels begin before their launch, worst {min(early)} ns"
        )


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
    timeline = run.timeline
    assert timeline is not None
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
