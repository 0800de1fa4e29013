"""Damaged traces of a GPU: found, counted, and nothing concluded from what they cannot carry."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpulab.analysis.facts import facts
from gpulab.analysis.integrity import Integrity, integrity
from gpulab.diagnosis.diagnose import diagnose
from gpulab.run import Category, Run, Timeline
from tests.support import synthetic
from tests.support.timelines import LANES, MAIN, STREAM, Span, timeline

US = 1_000
STEP = 100 * US  # one kernel of 60 µs per step, launched 10 µs before it
STEPS = 2_000


def trace(
    *, lost: int = 0, shift_us: float = 0, graph: bool = False, empty_kernels: int = 0, device_wait: bool = True
) -> Timeline:
    """Steps of one launch and one kernel each, then a wait for the device; `lost` kernels are missing.

    host    L.........L.........   ...  W
    device   .KKKKKK...KKKKKK...
    """
    call, spans = "cudaGraphLaunch" if graph else "cudaLaunchKernel", []
    for i in range(STEPS):
        spans.append(Span(call, Category.CUDA_RUNTIME, MAIN, i * STEP, 5 * US, i + 1))
        if i >= lost:
            start, length = i * STEP + 10 * US + int(shift_us * US), 0 if i < lost + empty_kernels else 60 * US
            spans.append(Span("kernel", Category.KERNEL, STREAM, start, length, i + 1))
    if device_wait:
        spans.append(Span("cudaDeviceSynchronize", Category.CUDA_RUNTIME, MAIN, STEPS * STEP, 20 * US))
    return replace(timeline(spans), lanes=LANES[: STREAM + 1], window_ns=(0, (STEPS + 1) * STEP))


def run_of(recorded: Timeline) -> Run:
    return replace(synthetic.gpu_case().run, timeline=recorded, traced_numbers=())


def found(recorded: Timeline) -> Integrity:
    result = integrity(run_of(recorded))
    assert result is not None
    return result


def count(result: Integrity, name: str) -> int:
    return next(c.count for c in result.checks if c.name == name)


def test_a_sound_trace_withholds_nothing() -> None:
    result = found(trace())
    assert result.state == "ok"
    assert result.withheld == frozenset()
    assert all(c.count == 0 and c.meaning == "" for c in result.checks)


@pytest.mark.parametrize(("lost", "state"), [(0, "ok"), (2, "ok"), (20, "degraded"), (100, "unusable")])
def test_launches_without_kernels(lost: int, state: str) -> None:
    result = found(trace(lost=lost))
    assert count(result, "launches_without_kernels") == lost
    assert result.state == state
    assert ("breakdown" in result.withheld) == (state == "unusable")


def test_nothing_came_back() -> None:
    run = run_of(trace(lost=STEPS))
    result = integrity(run)
    assert result is not None
    assert result.state == "unusable"
    assert facts(run).breakdown is None
    assert diagnose(facts(run)).first.key == "cannot_tell"
    assert "CUPTI" in diagnose(facts(run)).first.evidence[0].words


def test_kernels_before_their_launch_withhold_only_the_causes() -> None:
    run = run_of(trace(shift_us=-40))
    result = integrity(run)
    assert result is not None
    assert result.state == "degraded"
    assert count(result, "kernels_before_launch") == STEPS
    known = facts(run)
    assert known.breakdown is not None
    assert known.breakdown.busy_fraction == pytest.approx(0.6, abs=0.01)
    assert known.breakdown.share["unknown"] == pytest.approx(0.4, abs=0.01)
    assert diagnose(known).first.key == "cannot_tell"
    assert "clocks" in diagnose(known).first.evidence[0].words


def test_work_after_the_call_that_waited_for_it_is_a_shift() -> None:
    assert count(found(trace(shift_us=200)), "clock_shift") == 1
    assert count(found(trace(shift_us=20)), "clock_shift") == 0
    assert count(found(trace(shift_us=200, device_wait=False)), "clock_shift") == 0


def test_graphs_and_kernels_too_short_to_measure_are_counted() -> None:
    result = found(trace(graph=True, empty_kernels=7))
    assert count(result, "graph_replays") == STEPS
    assert count(result, "zero_duration_kernels") == 7
    assert result.withheld == {"launch_statistics"}
    assert result.state == "ok"


def test_a_run_without_a_trace_has_no_verdict() -> None:
    assert integrity(replace(synthetic.gpu_case().run, timeline=None)) is None
