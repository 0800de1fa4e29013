"""Steps on a GPU that the host runs ahead of: the case in which the host's own windows are far too short."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.analysis.facts import facts
from gpulab.analysis.integrity import integrity
from gpulab.prediction.replay import Changes, Replay
from gpulab.run import Category, Run
from gpulab.views.run_figure import binned_steps
from tests.support import synthetic
from tests.support.timelines import MAIN, STREAM, STREAM_2, Span, ran, spans_of, timeline

US, MS = 1_000, 1_000_000


def ahead(launches: int, steps: int, step_ms: int) -> Run:
    """A loop whose host launches one kernel every 10 µs and never waits; each step takes the GPU `step_ms`."""
    kernel_ns, spans, free, edges = step_ms * MS // launches, [], 0, [0]
    for step in range(steps):
        for i in range(launches):
            number = step * launches + i + 1
            at = edges[-1] + i * 10 * US
            spans.append(Span("cudaLaunchKernel", Category.CUDA_RUNTIME, MAIN, at, 5 * US, number))
            start = max(free, at + 8 * US)
            free = start + kernel_ns
            spans.append(Span(f"gemm_{step}", Category.KERNEL, STREAM, start, kernel_ns, number))
        edges.append(edges[-1] + launches * 10 * US)
    device = replace(synthetic.gpu_case().run.device, index=0)
    base = replace(synthetic.no_step_case().run, device=device, wall_ns=free, code="")
    return ran(base, timeline(spans), list(pairwise(edges)))


@pytest.mark.parametrize("launches", [5, 150, 300])
def test_a_step_lasts_as_long_as_the_gpu_works_for_it(launches: int) -> None:
    run = ahead(launches, 5, 100)
    assert (run.steps.wall_ns < 4 * MS).all()
    known = facts(run)
    assert known.traced_step_us is not None and known.traced_step_us.median == pytest.approx(100_000, rel=0.001)
    account = known.breakdown
    assert account is not None and account.busy_fraction == pytest.approx(1, abs=0.001)
    assert [s.parts_ns["compute"] for s in account.steps] == [100 * MS // launches * launches] * 5


def test_kernels_belong_to_the_step_that_launched_them() -> None:
    known = facts(ahead(150, 5, 100))
    assert {row.name: row.calls_per_step for row in known.kernels} == {f"gemm_{i}": 30.0 for i in range(5)}
    assert known.trace is not None and known.trace.kernels is not None and known.trace.kernels.count == 750
    assert known.work is not None and len(known.work.rows) == 750


def test_the_replay_plays_steps_of_the_gpu() -> None:
    run = ahead(150, 5, 100)
    replay = Replay(run, 0)
    np.testing.assert_allclose(replay.play().step_ns, 100 * MS, rtol=0.001)
    assert run.timeline is not None
    half = replay.play(Changes(device_factor=np.full(len(run.timeline), 0.5)))
    np.testing.assert_allclose(half.step_ns, 50 * MS, rtol=0.001)
    none = replay.play(Changes(device_factor=np.zeros(len(run.timeline))))
    np.testing.assert_allclose(none.step_ns[1:], 1.5 * MS, rtol=0.02)


def test_the_report_says_that_the_host_runs_ahead() -> None:
    trust = integrity(ahead(150, 5, 100))
    assert trust is not None and trust.state == "ok" and not trust.withheld
    (check,) = [c for c in trust.checks if c.name == "host_ahead"]
    assert "493 ms ahead of the GPU" in check.meaning


def test_a_copy_beside_the_kernels_holds_no_step_back() -> None:
    run = ahead(10, 3, 1)
    assert run.timeline is not None
    late = Span("cudaMemcpyAsync", Category.CUDA_RUNTIME, MAIN, 50 * US, 2 * US, 9_999)
    copy = Span("Memcpy HtoD (Pinned -> Device)", Category.GPU_MEMCPY, STREAM_2, 60 * US, 20 * MS, 9_999)
    both = timeline([late, copy, *spans_of(run.timeline)])
    account = facts(replace(run, timeline=both)).breakdown
    assert account is not None
    assert [s.end_ns - s.start_ns for s in account.steps] == pytest.approx([MS, MS, MS], rel=0.02)


def test_bars_of_profiled_steps_stand_where_the_gpu_works() -> None:
    known = facts(ahead(150, 5, 100))
    drawn = binned_steps(known)
    assert (drawn.right_s - drawn.left_s).tolist() == pytest.approx([0.1] * 5, rel=0.001)
    assert known.outside_steps_fraction == pytest.approx(0, abs=0.001)
