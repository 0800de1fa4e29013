"""A GPU that never idles, recorded from any moment to any other: nowhere is its queued work told as idle time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.analysis.facts import Facts, facts
from gpulab.diagnosis.diagnose import diagnose
from gpulab.run import Category
from gpulab.timeline.trace_steps import find_steps
from tests.support import synthetic
from tests.support.timelines import DEVICE, MAIN, STREAM, Span, ran, timeline

MS = 1_000_000
KERNELS, KERNEL_MS = 30, 8
IDLE = ("data_wait", "sync_wait", "blocking_copy", "allocator", "queued", "launch", "optimizer", "other", "start_up")


AHEAD = 5  # kernels


def busy(*, waits: bool) -> list[Span]:
    """A host that stays some kernels ahead of a GPU that never idles; it `waits` for one of them, or for nothing."""
    played = []
    for i in range(KERNELS):
        at = max(0, i - AHEAD) * KERNEL_MS * MS + i * 20_000
        played += [
            Span("aten::mm", Category.CPU_OP, MAIN, at, 20_000),
            Span("cudaLaunchKernel", Category.CUDA_RUNTIME, MAIN, at + 5_000, 10_000, i + 1),
            Span("gemm", Category.KERNEL, STREAM, MS // 10 + i * KERNEL_MS * MS, KERNEL_MS * MS, i + 1),
        ]
        if waits and i >= AHEAD:
            end = at + KERNEL_MS * MS
            played.append(Span("cudaEventSynchronize", Category.CUDA_RUNTIME, MAIN, at + 20_000, end - at - 20_000))
    return played


def recorded(spans: list[Span]) -> Facts:
    line = timeline(spans)
    device = replace(synthetic.gpu_case().run.device, index=0)
    base = replace(synthetic.no_step_case().run, device=device, wall_ns=line.window_ns[1] - line.window_ns[0], code="")
    found = find_steps(line)
    return facts(replace(ran(base, line, []), steps=found.steps, step_source=found.source, source="trace"))


@settings(max_examples=40, deadline=None)
@given(st.booleans(), st.booleans(), st.integers(0, 200 * MS), st.integers(60 * MS, 300 * MS))
def test_queued_work_is_never_idle(waits: bool, launched: bool, begin: int, length: int) -> None:
    """The profiler keeps what begins and ends while it runs; of the GPU's work perhaps only what it saw `launched`."""
    within = [s for s in busy(waits=waits) if begin <= s.start and s.end <= begin + length]
    seen = {s.correlation for s in within if s.category == Category.CUDA_RUNTIME}
    within = [s for s in within if not launched or s.category not in DEVICE or s.correlation in seen]
    if not any(s.category in DEVICE for s in within):
        return
    known = recorded(within)
    account = known.breakdown
    if account is None:  # too much was lost
        return
    assert sum(account.share[part] for part in IDLE) < 0.01
    said = " ".join(finding.summary for finding in diagnose(known, predict_cures=False).findings)
    assert "idle" not in said and "aunch" not in said and "PyTorch ran nothing" not in said


@pytest.mark.parametrize("graph", [False, True])
def test_work_of_before_the_recording_is_left_out(graph: bool) -> None:
    call = "cudaGraphLaunch" if graph else "cudaLaunchKernel"
    kernels = [
        Span("gemm", Category.KERNEL, STREAM, (34 + 8 * i) * MS, 8 * MS, 1 if graph else i + 1) for i in range(10)
    ]
    launches = [
        Span(call, Category.CUDA_RUNTIME, MAIN, (i + 1) * MS // 10, 10_000, i + 1) for i in range(1 if graph else 10)
    ]
    wait = Span("cudaDeviceSynchronize", Category.CUDA_RUNTIME, MAIN, 2 * MS, 112 * MS)
    for spans in ([*launches, *kernels], [*launches, wait, *kernels]):
        known = recorded(spans)
        account = known.breakdown
        assert account is not None and account.share["compute"] == pytest.approx(1, abs=0.01)
        assert account.windows[0, 0] == 34 * MS


def test_a_stretch_that_nothing_explains_is_unknown() -> None:
    """Kernels are lost between two that are recorded, and after the last one while the host waits on."""
    spans = [
        Span("cudaLaunchKernel", Category.CUDA_RUNTIME, MAIN, 0, 10_000, 1),
        Span("gemm", Category.KERNEL, STREAM, 20_000, 10 * MS, 1),
        Span("cudaLaunchKernel", Category.CUDA_RUNTIME, MAIN, 100_000, 10_000, 2),
        Span("gemm", Category.KERNEL, STREAM, 30 * MS, 10 * MS, 2),
        Span("cudaStreamSynchronize", Category.CUDA_RUNTIME, MAIN, 200_000, 60 * MS),
        Span("aten::add", Category.CPU_OP, MAIN, 70 * MS, MS),
    ]
    known = recorded(spans)
    account = known.breakdown
    assert account is not None and account.share["unknown"] > 0.6
    assert account.share["sync_wait"] + account.share["queued"] == pytest.approx(0, abs=0.001)
    assert diagnose(known, predict_cures=False).first.summary.startswith("The GPU computes for ")
    assert known.work is not None and np.diff(known.work.idle, axis=1).sum() < 12 * MS
