"""The replay against a machine simulated by hand, and against traces of real GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.facts import facts
from gpulab.prediction.replay import Changes, Replay
from gpulab.run import DEVICE_CATEGORIES, Category, Run
from gpulab.trace.load import load_run
from tests.support import real_traces, synthetic
from tests.support import timelines as made
from tests.support.timelines import MAIN, STREAM, STREAM_2, Span

LATENCY, GAP, LEAST_SYNC = 5_000, 500, 2_000
CALL = 1_000  # ns that the host spends in a launching call


class Op(Struct, frozen=True):
    """What the simulated program does next, after `before` ns of Python: launch a kernel, or wait for the device."""

    before: int
    kernel: int | None  # its duration; None: a synchronization
    stream: int = STREAM


def machine(program: Sequence[Op]) -> tuple[list[Span], int]:
    """What a device with one latency and one gap does with it: spans, and when the host has ended."""
    now, spans, free = 0, [], {STREAM: -(10**12), STREAM_2: -(10**12)}
    for number, op in enumerate(program, start=1):
        now += op.before
        if op.kernel is None:
            end = max(now + LEAST_SYNC, *free.values())
            spans.append(Span("cudaDeviceSynchronize", Category.CUDA_RUNTIME, MAIN, now, end - now))
            now = end
            continue
        spans.append(Span("cudaLaunchKernel", Category.CUDA_RUNTIME, MAIN, now, CALL, number))
        start = max(now + LATENCY, free[op.stream] + GAP)
        spans.append(Span(f"k{number}", Category.KERNEL, op.stream, start, op.kernel, number))
        free[op.stream] = start + op.kernel
        now += CALL
    return spans, now


def run_of(spans: Sequence[Span], end: int) -> Run:
    """A run whose whole window is one step."""
    timeline = replace(made.timeline(spans), window_ns=(0, end))
    device = replace(synthetic.gpu_case().run.device, index=0)
    return replace(synthetic.no_step_case().run, device=device, timeline=timeline, wall_ns=end)


def device_end(spans: Sequence[Span], end: int) -> int:
    """When the step is over for the device: all work of the stream that computes most has ended, or the host has."""
    time = {lane: sum(s.duration + 1 for s in spans if s.lane == lane) for lane in (STREAM, STREAM_2)}
    main = STREAM if time[STREAM] >= time[STREAM_2] else STREAM_2
    return max([end, *(s.end for s in spans if s.lane == main)])


def row_of(run: Run, name: str) -> int:
    assert run.timeline is not None
    return int(np.flatnonzero(run.timeline.name_id == run.timeline.names.index(name))[0])


durations = st.integers(100, 300_000)
one_stream = st.lists(
    st.builds(Op, before=st.integers(0, 40_000), kernel=st.one_of(durations, st.none())), min_size=1, max_size=20
).map(lambda ops: [Op(1_000, 5_000), *ops, Op(0, None)])
two_streams = st.lists(
    st.builds(Op, before=st.integers(0, 40_000), kernel=durations, stream=st.sampled_from([STREAM, STREAM_2])),
    min_size=1,
    max_size=20,
).map(lambda ops: [Op(1_000, 5_000), Op(20_000, 5_000, STREAM_2), *ops])


def syncs(program: Sequence[Op]) -> int:
    return sum(op.kernel is None for op in program)


@settings(max_examples=50)
@given(one_stream | two_streams)
def test_the_unchanged_window_takes_as_long_as_it_did(program: list[Op]) -> None:
    spans, end = machine(program)
    played = Replay(run_of(spans, end), 0).play()
    assert played.step_ns.tolist() == [device_end(spans, end)]


@settings(max_examples=50)
@given(one_stream, st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=50, max_size=50))
def test_shorter_kernels_take_what_the_machine_would_take(program: list[Op], shares: list[float]) -> None:
    spans, end = machine(program)
    run = run_of(spans, end)
    assert run.timeline is not None
    changed, factor = [], np.ones(len(run.timeline))
    for number, (op, share) in enumerate(zip(program, shares, strict=False), start=1):
        if op.kernel is None:
            changed.append(op)
            continue
        changed.append(replace(op, kernel=round(op.kernel * share)))
        factor[row_of(run, f"k{number}")] = share
    _, truth = machine(changed)
    found = Replay(run, 0).play(Changes(device_factor=factor)).step_ns[0]
    # a wait that its own call outlasted shows its end by up to the call's least length too late
    assert abs(found - truth) <= LEAST_SYNC * syncs(program) + len(program)


@settings(max_examples=50)
@given(one_stream, st.integers(0, 20), st.sampled_from([0.0, 0.3, 1.0]))
def test_less_time_on_the_host_takes_what_the_machine_would_take(program: list[Op], which: int, share: float) -> None:
    spans, end = machine(program)
    which %= len(program)
    begins = sorted(s.start for s in spans if s.lane == MAIN)
    stretch = np.array([[begins[which] - program[which].before, begins[which]]], np.int64)
    changed = [replace(op, before=round(op.before * share)) if i == which else op for i, op in enumerate(program)]
    _, truth = machine(changed)
    found = Replay(run_of(spans, end), 0).play(Changes(host=((stretch, share),))).step_ns[0]
    assert abs(found - truth) <= LEAST_SYNC * (syncs(program) + 1) + len(program)


@settings(max_examples=50)
@given(one_stream)
def test_a_wait_that_no_longer_waits(program: list[Op]) -> None:
    spans, end = machine(program)
    run = run_of(spans, end)
    assert run.timeline is not None
    waits = np.flatnonzero(run.timeline.name_id == run.timeline.names.index("cudaDeviceSynchronize"))
    found = Replay(run, 0).play(Changes(free_waits=waits)).step_ns[0]
    free = [replace(op, before=op.before + LEAST_SYNC, kernel=0) if op.kernel is None else op for op in program]
    ran, end = machine(free)
    truth = device_end([s for s in ran if s.duration], end)
    assert abs(found - truth) <= (LEAST_SYNC + CALL) * syncs(program) + GAP * len(program)


@settings(max_examples=50)
@given(one_stream | two_streams, st.lists(st.floats(0, 1), min_size=50, max_size=50), st.floats(0, 1))
def test_shortening_more_never_takes_longer(program: list[Op], shares: list[float], less: float) -> None:
    spans, end = machine(program)
    run = run_of(spans, end)
    assert run.timeline is not None
    factor = np.resize(np.array(shares), len(run.timeline))
    replay = Replay(run, 0)
    some = replay.play(Changes(device_factor=factor)).step_ns[0]
    more = replay.play(Changes(device_factor=factor * less)).step_ns[0]
    assert more <= some <= device_end(spans, end)


def test_a_copy_of_pageable_memory_waits_for_itself() -> None:
    spans = [
        Span("cudaLaunchKernel", Category.CUDA_RUNTIME, MAIN, 0, CALL, 1),
        Span("k", Category.KERNEL, STREAM, 5_000, 4_000_000, 1),
        Span("cudaMemcpyAsync", Category.CUDA_RUNTIME, MAIN, 10_000, 5_000_000, 2),
        Span("Memcpy HtoD (Pageable -> Device)", Category.GPU_MEMCPY, STREAM, 4_010_000, 1_050_000, 2),
    ]
    run = run_of(spans, 5_100_000)
    found = Replay(run, 0).play(Changes(device_factor=np.zeros(4))).step_ns[0]
    assert found < 200_000


def test_a_launch_into_a_full_queue_waits_for_the_device() -> None:
    """As on a V100: the host is 1,022 launches ahead, and each further launch takes as long as a kernel."""
    kernel, count, now, free = 50_000, 1_500, 0, 0
    ends, spans = list[int](), list[Span]()
    for number in range(1, count + 1):
        start_of_call = now
        room = ends[number - 1 - 1_022] if number > 1_022 else 0
        now = max(now + CALL, room)
        start = max(start_of_call + LATENCY, free + GAP)
        spans.append(Span("cudaLaunchKernel", Category.CUDA_RUNTIME, MAIN, start_of_call, now - start_of_call, number))
        spans.append(Span("k", Category.KERNEL, STREAM, start, kernel, number))
        free = start + kernel
        ends.append(free)
    run = run_of(spans, now)
    replay = Replay(run, 0)
    assert replay.play().step_ns[0] == free
    half = replay.play(Changes(device_factor=np.full(2 * count, 0.5))).step_ns[0]
    assert half == pytest.approx(free / 2, rel=0.05)


def test_changes_together() -> None:
    half = Changes(device_factor=np.array([0.5, 1.0]))
    both = half.and_also(Changes(device_factor=np.array([0.5, 0.0]))).and_also(Changes())
    assert both.device_factor is not None and both.device_factor.tolist() == [0.25, 0.0]
    replay = Replay(run_of(*machine([Op(10_000, 1_000), Op(0, None)])), 0)
    once = Changes(host=((np.array([[0, 10_000]], np.int64), 0.0),))
    assert replay.play(once).step_ns == replay.play(once.and_also(once)).step_ns, "what both remove is gone once"


def test_a_run_of_the_cpu_has_nothing_to_play() -> None:
    with pytest.raises(ValueError, match="no trace of a GPU"):
        Replay(synthetic.cpu_case().run, 0)
    with pytest.raises(ValueError, match="no work of GPU 7"):
        Replay(synthetic.gpu_case().run, 7)


@pytest.mark.parametrize("name", [*real_traces.SINGLE, *real_traces.RANKS])
def test_the_unchanged_window_of_a_real_trace(name: str) -> None:
    run = load_run(real_traces.path(name))
    account = facts(run).breakdown
    assert account is not None and account.device_index is not None and account.busy_fraction is not None
    replay = Replay(run, account.device_index)
    played = replay.play()
    measured = np.array([s.end_ns - s.start_ns for s in account.steps])
    np.testing.assert_allclose(played.step_ns, measured, rtol=0.05)
    assert played.busy_fraction == pytest.approx(account.busy_fraction, abs=0.05)
    assert run.timeline is not None
    half = replay.play(Changes(device_factor=np.full(len(run.timeline), 0.5)))
    assert half.step_ns.sum() <= played.step_ns.sum()


def test_of_a_large_window_only_median_steps_are_played() -> None:
    run = synthetic.gpu_case().run
    whole = Replay(run, 0).play()
    tasks = int(np.isin(run.timeline.category, [int(c) for c in DEVICE_CATEGORIES]).sum())  # type: ignore[union-attr]
    few = Replay(run, 0, most_tasks=tasks // 2).play()
    assert 1 <= len(few.step_ns) < len(whole.step_ns)
    assert np.isin(few.step_ns, whole.step_ns).all(), "played as in the whole window"
    assert len(Replay(run, 0, most_tasks=1).play().step_ns) == 1, "at least the median one"
    assert Replay(run, 0, most_tasks=1).play().step_ns[0] == np.sort(whole.step_ns)[(len(whole.step_ns) - 1) // 2]
