"""Step accounting against a dumber oracle: each nanosecond asked on its own."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import gpulab.analysis.breakdown as breakdown_module
from gpulab.analysis.breakdown import PARTS, breakdown, breakdowns, placed
from gpulab.analysis.operators import operators
from gpulab.run import Category, Device, Lane, Run, Timeline
from gpulab.timeline.labels import LAUNCHES, CallTree, labels
from gpulab.trace.profiler_result import cut
from tests.support import synthetic
from tests.support.timelines import Span, ran, timeline

TRAINER, AUTOGRAD, OTHER_THREAD, STREAM, STREAM_2 = range(5)
LANES = (
    Lane("thread", 0, 1, "training thread"),
    Lane("thread", 0, 2),
    Lane("thread", 0, 3),
    Lane("stream", 0, 7),
    Lane("stream", 0, 8),
)

HOST_CALLS = (Category.CPU_OP, Category.CUDA_RUNTIME)
BASE = synthetic.cpu_case().facts.run


def recorded(spans: list[Span], window: tuple[int, int]) -> Timeline:
    return replace(timeline(spans), lanes=LANES, window_ns=window, extra={})


def run_of(spans: list[Span], steps: list[tuple[int, int]]) -> Run:
    window = (min((s.start for s in spans), default=0), max([s.end for s in spans] + [e for _, e in steps] + [1]))
    return ran(BASE, recorded(spans, window), steps)


PYTHON_GAP = 3  # in place of the real one, which is longer than these runs


def gap_around(t: int, spans: list[Span]) -> tuple[int | None, int | None]:
    """The stretch around `t` that none of the spans covers: where it begins and ends; None where it has no end."""
    solid = [s for s in spans if s.duration]
    begin = max((s.end for s in solid if s.end <= t), default=None)
    return begin, min((s.start for s in solid if s.start > t), default=None)


def updating_at(t: int, spans: list[Span], lanes: set[int]) -> bool:
    """Inside Optimizer.step, and no backward pass that begins before its end goes on or comes later: a closure's."""
    mine = [s for s in spans if s.lane in lanes]

    def stepping(at: int) -> bool:
        return any(s.name.startswith("Optimizer.step#") and s.start <= at < s.end for s in mine)

    end = t
    while stepping(end):
        end += 1
    passes = [s for s in mine if s.name.startswith("autograd::engine") and s.duration and s.start < end]
    return end > t and all(t >= min(s.end, end) for s in passes)


def part_at(t: int, spans: list[Span]) -> str:
    """The part that one nanosecond belongs to, straight from definitions: no sets, no sorting."""
    here = [s for s in spans if s.start <= t < s.end]
    kinds = {s.category for s in spans}
    on_gpu = bool(kinds & {Category.KERNEL, Category.GPU_MEMCPY, Category.GPU_MEMSET})
    autograd = {s.lane for s in spans if s.name.startswith("autograd::engine")}
    trainer = [s for s in here if s.lane in autograd | {TRAINER}]

    def any_named(prefix: str | tuple[str, ...], among: list[Span]) -> bool:
        return any(s.name.startswith(prefix) for s in among)

    loading = any_named("enumerate(DataLoader)", [s for s in here if s.lane == TRAINER])
    optimizing = any_named("Optimizer.zero_grad#", trainer) or updating_at(t, spans, autograd | {TRAINER})
    annotated = any(
        s.category == Category.OVERHEAD
        or (s.category == Category.USER_ANNOTATION and s.name.endswith("(dynamo_timed)"))
        for s in trainer
    )
    if not on_gpu:
        if loading:
            return "data_wait"
        if any(s.category == Category.CPU_OP for s in trainer):
            return "compute"
        return "optimizer" if optimizing else "other" if annotated else "unknown"
    kernels = [s for s in here if s.category == Category.KERNEL]
    if any(not s.name.startswith("nccl") for s in kernels):
        return "compute"
    if kernels:
        return "communication"
    if any(s.category == Category.GPU_MEMCPY for s in here):
        return "memcpy"
    if any(s.category == Category.GPU_MEMSET for s in here):
        return "memset"
    calls = [s for s in trainer if s.category == Category.CUDA_RUNTIME]
    started = {s.correlation for s in spans if s.category == Category.CUDA_RUNTIME and s.correlation}
    work = [s for s in spans if s.category in (Category.KERNEL, Category.GPU_MEMCPY, Category.GPU_MEMSET)]
    begin, end = gap_around(t, work)
    recorded = t >= min(s.start for s in spans) if begin is None else True
    if end is not None and recorded and not any(s.correlation in started for s in work if s.start == end):
        return "unknown"
    if loading:
        return "data_wait"
    if any_named("cudaStreamSynchronize", calls):
        return "sync_wait"
    if any_named("cudaMemcpy", calls):
        return "blocking_copy"
    if any_named(("cudaMalloc", "cudaFree"), calls):
        return "allocator"
    for launch in spans:
        if launch.category == Category.CUDA_RUNTIME and launch.correlation:
            for kernel in spans:
                device = kernel.category in (Category.KERNEL, Category.GPU_MEMCPY, Category.GPU_MEMSET)
                if device and kernel.correlation == launch.correlation and launch.end <= t < kernel.start:
                    return "queued"
    if optimizing:
        return "optimizer"
    if any(s.category in HOST_CALLS for s in trainer):
        return "launch"
    begin, end = gap_around(t, [s for s in spans if s.lane in autograd | {TRAINER} and s.category in HOST_CALLS])
    if begin is not None and end is not None and end - begin <= PYTHON_GAP:
        return "launch"
    return "other" if annotated else "unknown"


HOST = st.sampled_from(
    [
        ("aten::mm", Category.CPU_OP),
        ("autograd::engine::evaluate_function: MmBackward0", Category.CPU_OP),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", Category.USER_ANNOTATION),
        ("Optimizer.step#SGD.step", Category.USER_ANNOTATION),
        ("ProfilerStep#1", Category.USER_ANNOTATION),
        ("save a checkpoint", Category.USER_ANNOTATION),
    ]
)
RUNTIME = st.sampled_from(["cudaLaunchKernel", "cudaStreamSynchronize", "cudaMemcpyAsync", "cudaMalloc", "cudaFree"])
DEVICE = st.sampled_from(
    [
        ("gemm", Category.KERNEL),
        ("ncclDevKernel_AllReduce", Category.KERNEL),
        ("Memcpy HtoD", Category.GPU_MEMCPY),
        ("Memset", Category.GPU_MEMSET),
    ]
)
START, DURATION = st.integers(0, 60), st.integers(0, 20)
host_spans = st.builds(
    lambda n, lane, s, d: Span(n[0], n[1], lane, s, d),
    HOST,
    st.sampled_from([TRAINER, AUTOGRAD, OTHER_THREAD]),
    START,
    DURATION,
)
runtime_spans = st.builds(
    lambda n, lane, s, d, c: Span(n, Category.CUDA_RUNTIME, lane, s, d, c),
    RUNTIME, st.sampled_from([TRAINER, OTHER_THREAD]), START, DURATION, st.integers(0, 4),
)  # fmt: skip
device_spans = st.builds(
    lambda n, lane, s, d, c: Span(n[0], n[1], lane, s, d, c),
    DEVICE, st.sampled_from([STREAM, STREAM_2]), START, DURATION, st.integers(0, 4),
)  # fmt: skip


def unique_launches(spans: list[Span]) -> list[Span]:
    """One launch per correlation, as CUPTI gives them (several kernels may share one: graph replays)."""
    seen: set[int] = set()
    kept = []
    for s in spans:
        if s.category == Category.CUDA_RUNTIME and s.correlation:
            if s.correlation in seen:
                continue
            seen.add(s.correlation)
        kept.append(s)
    return kept


def device_boundary(t: int, spans: list[Span]) -> int:
    """The dumb way: the last end on the busiest stream of what was called before t, or t itself."""
    on_device = [s for s in spans if s.category in (Category.KERNEL, Category.GPU_MEMCPY, Category.GPU_MEMSET)]
    calls = {s.correlation: s.start for s in spans if s.category == Category.CUDA_RUNTIME and s.correlation}
    kernels = [s for s in on_device if s.category == Category.KERNEL]
    kernels = [s for s in kernels if not s.name.startswith("nccl")] or kernels or on_device
    if not kernels:
        return t
    time = {lane: sum(s.duration + 1 for s in kernels if s.lane == lane) for lane in {s.lane for s in kernels}}
    main = min(time, key=lambda lane: (-time[lane], lane))
    mine = [s for s in on_device if s.lane == main]
    first = min((s.start for s in mine if s.correlation in calls), default=-1)
    began = min(s.start for s in spans)  # the recording
    called = [calls.get(s.correlation, min(s.start, began - 1) if s.start < first else s.start) for s in mine]
    before = [s.end for s, launch in zip(mine, called, strict=True) if launch < t]
    return max([t, *before])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(host_spans, runtime_spans), min_size=1, max_size=10),
    st.lists(device_spans, max_size=6),
    st.lists(st.integers(1, 25), min_size=1, max_size=3),
)
def test_every_nanosecond_goes_where_the_definition_says(
    host: list[Span], device: list[Span], lengths: list[int]
) -> None:
    spans = unique_launches(host + device)
    ends = np.cumsum(lengths).tolist()
    steps = list(zip([0, *ends[:-1]], ends, strict=True))
    with patch.object(breakdown_module, "PYTHON_GAP_NS", PYTHON_GAP):
        account = breakdown(run_of(spans, steps))
    assert account is not None
    busy: Counter[str] = Counter()
    for step, got in zip(steps, account.steps, strict=True):
        assert got.host == step
        start, end = got.start_ns, got.end_ns
        assert (start, end) == tuple(device_boundary(t, spans) for t in step)
        expected = dict.fromkeys(PARTS, 0)
        for t in range(start, end):
            expected[part_at(t, spans)] += 1
        assert got.parts_ns == expected
        assert sum(got.parts_ns.values()) == end - start
        busy.update(expected)
    if account.busy_fraction is not None and account.wall_ns:
        kernels_ns = busy["compute"] + busy["communication"]
        assert account.kernel_busy_fraction == pytest.approx(kernels_ns / account.wall_ns)
        assert account.busy_fraction == pytest.approx((kernels_ns + busy["memcpy"] + busy["memset"]) / account.wall_ns)
    lasting = any(s.end_ns > s.start_ns for s in account.steps)  # else the device was at earlier work all the time
    assert sum(account.share.values()) == pytest.approx(float(lasting))


def test_two_devices_are_accounted_apart() -> None:
    #          0         10        20        30
    # GPU 0    [gemm-----]                           10 of 30
    # GPU 1         [gemm---------------]            5..25, 20 of 30
    spans = [Span("gemm", Category.KERNEL, STREAM, 0, 10), Span("gemm", Category.KERNEL, STREAM_2, 5, 20)]
    run = run_of(spans, [(0, 30)])
    assert run.timeline is not None
    lanes = (*LANES[:STREAM_2], Lane("stream", 1, 7))
    first, second = breakdowns(replace(run, timeline=replace(run.timeline, lanes=lanes)))
    assert (first.device_index, first.busy_fraction, first.steps[0].parts_ns["compute"]) == (1, 20 / 30, 20)
    assert (second.device_index, second.busy_fraction, second.steps[0].parts_ns["compute"]) == (0, 10 / 30, 10)


def test_a_cpu_run_has_no_busy_fraction_and_no_step_no_pieces() -> None:
    run = run_of([Span("aten::mm", Category.CPU_OP, TRAINER, 0, 5)], [(0, 10)])
    account = breakdown(run)
    assert account is not None and account.busy_fraction is None and account.kernel_busy_fraction is None
    pieces = placed(replace(account, steps=()))
    assert pieces is None or len(pieces.part) == 0


def test_self_time_leaves_out_what_is_nested() -> None:
    # a [0 ............ 20)
    #   b [2 ... 8)  c [10 . 14)
    #     d [3 . 6)
    spans = [
        Span("a", Category.CPU_OP, TRAINER, 0, 20),
        Span("b", Category.CPU_OP, TRAINER, 2, 6),
        Span("d", Category.CPU_OP, TRAINER, 3, 3),
        Span("c", Category.CPU_OP, TRAINER, 10, 4),
        Span("e", Category.CPU_OP, OTHER_THREAD, 1, 10),
    ]
    run = run_of(spans, [(0, 20)])
    assert run.timeline is not None
    tree = CallTree.of(run.timeline, np.arange(5))
    names = [run.timeline.names[run.timeline.name_id[i]] for i in tree.rows]
    own = dict(zip(names, tree.self_ns(run.timeline).tolist(), strict=True))
    assert own == {"a": 10, "b": 3, "d": 3, "c": 4, "e": 10}
    account = breakdown(run)
    assert account is not None
    rows = {r.name: r for r in operators(run.timeline, account)}
    assert "e" not in rows, "another thread's operators are not the step's"
    assert rows["a"].self_us == 0.01 and rows["a"].total_us == 0.02 and rows["a"].share == 0.5


GPU = Device("cuda", "NVIDIA H100", 0)


def test_a_gpu_run_without_kernels_has_no_breakdown() -> None:
    spans = [
        Span("aten::mm", Category.CPU_OP, TRAINER, 0, 8),
        Span("cudaLaunchKernel", Category.CUDA_RUNTIME, TRAINER, 2, 1, 1),
    ]
    run = replace(run_of(spans, [(0, 10)]), device=GPU)
    assert run.timeline is not None and labels(run.timeline).of(*LAUNCHES).sum() == 1
    assert breakdown(run) is None
    assert breakdown(replace(run, device=BASE.device)) is not None


def test_a_cut_timeline_ends_at_the_first_span_left_out() -> None:
    spans = [Span("aten::mm", Category.CPU_OP, TRAINER, 10 * i, 5) for i in range(6)]
    whole = replace(recorded(spans, (0, 100)), extra={"bytes": np.arange(6.0)})
    short = cut(whole, 4)
    assert short.extra["bytes"].tolist() == [0, 1, 2, 3]
    assert len(short) == 4 and short.window_ns == (0, 40) and short.start_ns.tolist() == [0, 10, 20, 30]
    assert cut(whole, 6) is whole
