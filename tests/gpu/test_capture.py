"""Capture, accounting and the report's picture on a real NVIDIA GPU. Needs no IPython."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import gpulab  # noqa: E402
from gpulab.analysis.breakdown import PARTS  # noqa: E402
from gpulab.analysis.integrity import CLOCK_TOLERANCE_NS  # noqa: E402
from gpulab.run import Phase, Run, Timeline  # noqa: E402
from tests.support.gpu_checks import delays_ns, first_step_ns, kernels, lost_launches, profiled  # noqa: E402

pytestmark = pytest.mark.gpu


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
        lost, launched = lost_launches(trace_of(run))
        assert launched and lost < launched, f"run {number}: of {launched} kernels that were launched none came back"
        assert count_of(run, "launches_without_kernels") == lost, f"run {number}"
        assert lost <= 0.02 * launched, f"run {number}: {lost} of {launched} launches have no kernel"


def test_every_kernel_has_its_launch_and_begins_after_it(five_runs: list[Run]) -> None:
    for number, run in enumerate(five_runs, 1):
        delays = delays_ns(trace_of(run))
        assert None not in delays, f"run {number}: {delays.count(None)} kernels have no launch"
        early = [d for d in delays if d is not None and d < -CLOCK_TOLERANCE_NS]
        assert count_of(run, "kernels_before_launch") >= len(early), "gpulab sees them as well"
        assert not early, f"run {number}: {len(early)} kernels begin before their launch, worst {min(early)} ns"


def test_a_run_from_capture_to_its_picture(five_runs: list[Run], tmp_path: Path) -> None:
    run = five_runs[0]
    phases = run.steps.phase.tolist()
    assert len(run.steps) == 60
    assert phases.index(Phase.MEASURED) < phases.index(Phase.TRACED), "throughput comes before the profiler"
    assert run.memory.peak_allocated_bytes and run.memory.peak_allocated_bytes > 0
    shown = gpulab.report(run)
    known = shown.facts
    account = known.breakdown
    assert account is not None and account.busy_fraction is not None
    assert account.busy_fraction >= account.kernel_busy_fraction > 0  # type: ignore[operator]
    for step in account.steps:
        assert set(step.parts_ns) == set(PARTS)
        assert sum(step.parts_ns.values()) == step.end_ns - step.start_ns
    assert known.kernels, "no kernel in the table"
    assert None not in (known.step_us, known.traced_step_us, known.observer_us_per_step)
    assert "<svg" in shown.html()
    run.plot().savefig(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_steps_and_kernels_share_one_clock(five_runs: list[Run]) -> None:
    """The kernels of a profiled step lie within it or, run ahead of by the host, soon after: never before its start."""
    timeline = trace_of(five_runs[0])
    begun = timeline.start_ns[kernels(timeline)]
    assert len(begun) and (begun >= first_step_ns(timeline) - 50_000).all()
