"""Replayed graphs: what they wait for inside is their own order, and nobody is told to replay what is replayed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.analysis.facts import Facts, facts
from gpulab.diagnosis.diagnose import diagnose
from gpulab.run import Category
from tests.support.loops import Machine, loop
from tests.support.timelines import STREAM, Span

ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
REPLAYS = ["cudaGraphLaunch", "hipGraphLaunch"]


def replay(machine: Machine, call: str, kernels: int, gpu_us: float, gap_us: float) -> None:
    """One call starts them all; each begins so long after the one before."""
    correlation = 1_000_000 + round(machine.host)
    machine.spans.append(Span(call, Category.CUDA_RUNTIME, 0, round(machine.host * 1e3), 20_000, correlation))
    machine.host += 20
    at = max(machine.free, machine.host)
    for _ in range(kernels):
        machine.spans.append(Span(ADD, Category.KERNEL, STREAM, round(at * 1e3), round(gpu_us * 1e3), correlation))
        at += gpu_us + gap_us
    machine.free = at - gap_us


def decoding(call: str, between: int = 0, *, waits: bool = True) -> Facts:
    """A replay of 200 kernels of 5 µs, 5 µs apart, whose result is read; then so many copies prepare the next.

    Without the reading the first 20 of the copies are started while the graph runs.
    """

    def step(machine: Machine) -> None:
        replay(machine, call, 200, 5, 5)
        if waits:
            machine.call("cudaStreamSynchronize", 1, waits=True)
        for _ in range(between):
            machine.operator("aten::copy_", ADD, 4, 100)

    return loop(step).facts()


def without_correlations(call: str) -> Facts:
    """As HIP may write it: the kernels name no call."""
    run = decoding(call).run
    assert run.timeline is not None
    without = np.where(run.timeline.category == Category.KERNEL, 0, run.timeline.correlation)
    return facts(replace(run, timeline=replace(run.timeline, correlation=without)))


def advice(known: Facts) -> str:
    return " ".join(f"{f.summary} {f.cure} {f.settings}" for f in diagnose(known, predict_cures=False).findings)


@pytest.mark.parametrize("call", REPLAYS)
@pytest.mark.parametrize("made", [decoding, lambda call: decoding(call, waits=False), without_correlations])
def test_gaps_inside_a_replay_are_the_graphs_own(call: str, made: Callable[[str], Facts]) -> None:
    known = made(call)
    account = known.breakdown
    assert account is not None and account.share["queued"] == pytest.approx(0.48, abs=0.03)
    assert account.share["sync_wait"] < 0.02 and account.share["launch"] < 0.02
    assert "torch.compile" not in advice(known) and "('compile'" not in advice(known)
    if made is not without_correlations:
        first = diagnose(known, predict_cures=False).first
        assert first.key == "cannot_tell" and "inside replayed graphs" in first.summary


@pytest.mark.parametrize("call", REPLAYS)
def test_between_two_replays_the_cpu_is_the_cause(call: str) -> None:
    known = decoding(call, between=60, waits=False)
    first = diagnose(known, predict_cures=False).first
    assert first.key == "launch_bound" and "between replayed graphs" in first.summary
    assert first.recoverable_us_per_step == pytest.approx(40 * 96, rel=0.05) and first.settings == ()
    assert "torch.compile" not in advice(known)


def test_eager_work_beside_a_small_replay_keeps_its_advice() -> None:
    def step(machine: Machine) -> None:
        replay(machine, "cudaGraphLaunch", 10, 5, 5)
        for _ in range(300):
            machine.operator("aten::add", ADD, 4, 20)

    first = diagnose(loop(step).facts(), predict_cures=False).first
    assert first.key == "launch_bound" and dict(first.settings) == {"compile": "reduce-overhead"}
