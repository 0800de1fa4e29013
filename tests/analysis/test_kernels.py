"""Kernels, operators, launches and copies: against a search span by span, and on real traces."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulab.analysis.breakdown import Breakdown, StepParts
from gpulab.analysis.kernels import copies, est_sm_efficiency, kernels, launches
from gpulab.analysis.operators import operators
from gpulab.intervals import Intervals
from gpulab.run import Category
from gpulab.timeline.labels import OPERATORS, CallTree, labels, open_at_start
from tests.support import loaded_traces
from tests.support.timelines import BACKWARD, DEVICE, LANES, MAIN, OTHER_GPU, STREAM, STREAM_2, Span, in_order, timeline

US = 1000
ALWAYS = np.array([[-(2**62), 2**62]])
LAUNCH = {Category.GPU_MEMCPY: "cudaMemcpyAsync", Category.GPU_MEMSET: "cudaMemsetAsync"}

operator_spans = st.lists(
    st.tuples(st.sampled_from("ABC"), st.sampled_from([MAIN, BACKWARD]), st.integers(0, 40), st.integers(0, 25)),
    max_size=10,
)
device_items = st.lists(
    st.tuples(
        st.sampled_from([*DEVICE, Category.KERNEL]),
        st.sampled_from(["volta_sgemm", "volta_h884gemm", "other"]),
        st.sampled_from([MAIN, BACKWARD]),  # the thread that launches
        st.one_of(st.none(), st.integers(0, 45)),  # when; None: outside the trace
        st.integers(0, 5),  # length of the launch
        st.integers(0, 30),  # start
        st.integers(0, 20_000),  # length
        st.booleans(),  # launched together with the one before (a graph)
    ),
    max_size=10,
)
windows = st.one_of(st.none(), st.tuples(st.integers(0, 20), st.integers(1, 20)))


def made(operators: list[Any], items: list[Any]) -> list[Span]:
    spans = [Span(name, Category.CPU_OP, lane, start, length) for name, lane, start, length in operators]
    correlation = 0
    for category, name, thread, launched, launch_length, start, length, together in items:
        if not (together and correlation):
            correlation += 1
            call = LAUNCH.get(category, "cudaLaunchKernel")
            if launched is not None:
                spans.append(Span(call, Category.CUDA_RUNTIME, thread, launched, launch_length, correlation))
        spans.append(Span(name, category, STREAM, start, length, correlation, {"occupancy_pct": len(name)}))
    return spans


def window(raw: tuple[int, int] | None) -> tuple[Intervals, range]:
    if raw is None:
        return ALWAYS, range(-(2**62), 2**62)
    return np.array([[raw[0], raw[0] + raw[1]]], dtype=np.int64), range(raw[0], raw[0] + raw[1])


def call_of(item: Span, spans: list[Span]) -> Span | None:
    found = [s for s in spans if s.category == Category.CUDA_RUNTIME and s.correlation == item.correlation]
    return found[0] if found else None


def called(item: Span, spans: list[Span]) -> int:
    """When it was launched; without a launch: its begin, or before the recording where its stream had launched none."""
    call = call_of(item, spans)
    if call is not None:
        return call.start
    mine = [s for s in spans if s.category in DEVICE and s.lane == item.lane and call_of(s, spans) is not None]
    lost = mine and item.start < min(s.start for s in mine)
    return min(item.start, timeline(spans).window_ns[0] - 1) if lost else item.start


def owner(point: Span, spans: list[Span]) -> Span | None:
    """The operator on that thread that began last before the point and had not ended there."""
    around = [s for s in in_order(spans) if s.category == Category.CPU_OP and s.lane == point.lane and s.duration > 0]
    around = [s for s in around if s.start <= point.start < s.end]
    return around[-1] if around else None


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=25))
def test_the_latest_row_still_open(raw: list[tuple[int, int]]) -> None:
    ordered = sorted(((s, s + d) for s, d in raw), key=lambda span: (span[0], -span[1]))
    start = np.array([s for s, _ in ordered], dtype=np.int64)
    end = np.array([e for _, e in ordered], dtype=np.int64)
    expected = [max((j for j in range(i) if end[j] > start[i]), default=-1) for i in range(len(ordered))]
    assert open_at_start(start, end).tolist() == expected


@given(operator_spans, device_items)
def test_launch_and_operator_of_each_item(raw: list[Any], items: list[Any]) -> None:
    spans = in_order(made(raw, items))
    t = timeline(spans)
    rows = np.array([i for i, s in enumerate(spans) if s.category in DEVICE], dtype=np.int64)
    tree = CallTree.of(t, np.array([i for i, s in enumerate(spans) if s.category == Category.CPU_OP], dtype=np.int64))
    for row, call in zip(rows.tolist(), labels(t).call[rows].tolist(), strict=True):
        found = spans[call] if call >= 0 else None
        assert found == call_of(spans[row], spans)
        if found is not None:
            held = int(tree.innermost(t, np.array([call]))[0])
            assert (spans[held] if held >= 0 else None) == owner(found, spans)


@given(operator_spans, device_items)
def test_device_time_of_operators_by_name(raw: list[Any], items: list[Any]) -> None:
    spans = in_order(made(raw, items))
    step = StepParts(1, -1000, 10_000, {"compute": 11_000}, 0, (-1000, 10_000))
    t = timeline(spans)
    table = operators(t, Breakdown("cuda:0", 0, (step,), {}, {}, 1, None, None))
    mine = [s for s, training in zip(spans, labels(t).training(*OPERATORS), strict=True) if training]
    expected: dict[str, int] = {}
    for item in (s for s in spans if s.category in DEVICE):
        call = call_of(item, spans)
        launcher = owner(call, mine) if call is not None else None
        if launcher is not None:
            expected[launcher.name] = expected.get(launcher.name, 0) + item.duration
    device_us = {row.name: row.device_us for row in table if row.device_us}
    assert device_us == pytest.approx({name: ns / US for name, ns in expected.items() if ns})


@given(device_items, windows)
def test_kernels(items: list[Any], cut: tuple[int, int] | None) -> None:
    spans = made([], items)
    wanted, inside = window(cut)
    seen = kernels(timeline(spans), wanted)
    mine = [s for s in spans if s.category == Category.KERNEL and (cut is None or called(s, spans) in inside)]
    time = sum(s.duration for s in mine)
    nvidia = any(s.category == Category.CUDA_RUNTIME for s in spans)
    assert seen.count == len(mine)
    mean = sum(len(s.name) * s.duration for s in mine) / time if time else None
    assert seen.est_achieved_occupancy_pct == (pytest.approx(mean) if time else None)
    short = [s.duration for s in mine if s.duration < 10 * US]
    matrix = sum(s.duration for s in mine if s.name == "volta_h884gemm")
    assert seen.short_count_fraction == (pytest.approx(len(short) / len(mine)) if mine else None)
    assert seen.short_time_fraction == (pytest.approx(sum(short) / time) if time else None)
    assert seen.tensor_core_fraction == (pytest.approx(matrix / time) if time and nvidia else None)


@given(device_items, windows)
def test_launches(items: list[Any], cut: tuple[int, int] | None) -> None:
    spans = made([], items)
    wanted, inside = window(cut)
    seen = launches(timeline(spans), wanted)
    calls = [s for s in spans if s.name == "cudaLaunchKernel" and s.start in inside]
    items_of = [[s for s in spans if s.category in DEVICE and s.correlation == c.correlation] for c in calls]
    delays = [max(0, min(s.start for s in i) - c.end) for c, i in zip(calls, items_of, strict=True) if i]
    assert seen.count == seen.per_step == len(calls)
    assert seen.median_us == (statistics.median(c.duration for c in calls) / US if calls else None)
    assert seen.median_queue_delay_us == (pytest.approx(statistics.median(delays) / US) if delays else None)
    assert seen.without_kernel == sum(not found for found in items_of)
    assert seen.most_kernels_per_launch == max(map(len, items_of), default=0)
    lost = [s for s in spans if s.category == Category.KERNEL and call_of(s, spans) is None]
    assert seen.kernels_without_launch == len(lost)


def test_a_launch_whose_kernel_was_lost() -> None:
    spans = [
        Span("cudaLaunchKernel", Category.CUDA_RUNTIME, MAIN, 0, 4 * US, 1),
        Span("cuLaunchKernelEx", Category.CUDA_DRIVER, MAIN, 10 * US, 6 * US, 2),
        Span("cudaLaunchHostFunc", Category.CUDA_RUNTIME, MAIN, 20 * US, US, 3),
        Span("cudaMemcpyAsync", Category.CUDA_RUNTIME, MAIN, 30 * US, US, 4),
        Span("k", Category.KERNEL, STREAM, 50 * US, US, 2),
    ]
    seen = launches(timeline(spans), ALWAYS)
    assert (seen.count, seen.without_kernel, seen.kernels_without_launch) == (2, 1, 0)
    assert seen.median_us == 5
    assert seen.median_queue_delay_us == 34
    assert seen.per_step == 2


def test_copies_by_kind_and_host_memory() -> None:
    def copy(name: str, microseconds: int, size: float) -> Span:
        return Span(name, Category.GPU_MEMCPY, STREAM, 0, microseconds * US, 0, {"bytes": size})

    unknown = float("nan")
    spans = [
        copy("Memcpy HtoD (Pageable -> Device)", 100, 1e6),
        copy("Memcpy HtoD (Pageable -> Device)", 300, 1e6),
        copy("Memcpy HtoD (Pinned -> Device)", 40, 1e6),
        copy("Memcpy DtoH (Device -> Pageable)", 20, 1e4),
        copy("Memcpy DtoH (Device -> Pageable)", 10, unknown),
        copy("Memcpy DtoD (Device -> Device)", 5, unknown),
        copy("Memcpy PtoP (Device -> Device)", 4, 4e5),
        copy("CopyHostToDevice", 1, 1e3),
    ]
    found = [(r.kind, r.host_memory, r.count, r.time_us, r.bytes, r.gb_per_s) for r in copies(timeline(spans), ALWAYS)]
    assert found == [
        ("HtoD", "pageable", 2, 400, 2_000_000, pytest.approx(5.0)),
        ("HtoD", "pinned", 1, 40, 1_000_000, pytest.approx(25.0)),
        ("DtoH", "pageable", 2, 30, 10_000, pytest.approx(0.5)),
        ("DtoD", None, 1, 5, None, None),
        ("PtoP", None, 1, 4, 400_000, pytest.approx(100.0)),
        ("unknown", None, 1, 1, 1_000, pytest.approx(1.0)),
    ]


@pytest.mark.parametrize("call", ["hipLaunchKernel", "another maker's launch"])
def test_only_nvidia_names_show_kernels_on_matrix_units(call: str) -> None:
    spans = [
        Span(call, Category.CUDA_RUNTIME, MAIN, 0, US, 1),
        Span("Cijk_Ailk_Bljk_HHS_BH_MT128x128x32", Category.KERNEL, STREAM, 2 * US, US, 1),
    ]
    assert kernels(timeline(spans), ALWAYS).tensor_core_fraction is None


@pytest.mark.parametrize(
    ("name", "fraction"),
    [
        ("v100_resnet50_workers0", 0.0),
        ("a100_8ranks_rank3", 0.1495),
        ("h100_owlv2_starved", 0.4684),  # s1688, s16816, s161616 and sm90_xmma: the plugin sees 0.08
        ("b200_moe_launch_bound", 0.598),  # bmm_…sm100f .480, nvjet .072, fmha .045: the plugin sees 0
        ("mi300_resnet_healthy", None),
    ],
)
def test_tensor_core_share_of_real_traces(name: str, fraction: float | None) -> None:
    seen = kernels(loaded_traces.trace(name).timeline, ALWAYS).tensor_core_fraction
    assert seen == (pytest.approx(fraction, abs=0.001) if fraction is not None else None)


@pytest.mark.parametrize("name", loaded_traces.ALL)
def test_operators_launched_nearly_all_work_of_a_real_device(name: str) -> None:
    t = loaded_traces.trace(name).timeline
    items = np.flatnonzero(np.isin(t.category, [int(c) for c in DEVICE]))
    tree = CallTree.of(t, np.flatnonzero(t.category == Category.CPU_OP))
    call = labels(t).call[items]
    owner = np.full(len(items), -1)
    owner[call >= 0] = tree.innermost(t, call[call >= 0])
    assert (owner >= 0).mean() > (0.7 if name.startswith("mi300") or "dlrm" in name else 0.99)


def test_copies_of_real_traces() -> None:
    (upload,) = copies(loaded_traces.trace("v100_resnet50_workers0").timeline, ALWAYS)
    assert (upload.kind, upload.host_memory, upload.count, upload.bytes) == ("HtoD", "pageable", 12, 115_607_040)
    assert upload.gb_per_s == pytest.approx(115_607_040 / 11_492e-6 / 1e9)
    kinds = {(c.kind, c.host_memory) for c in copies(loaded_traces.trace("a100_8ranks_rank3").timeline, ALWAYS)}
    assert kinds == {("HtoD", "pinned"), ("DtoH", "pageable"), ("DtoD", None)}


blocks_on_device = st.tuples(
    st.sampled_from([STREAM, STREAM_2, OTHER_GPU]),
    st.integers(0, 30),  # start
    st.integers(0, 20),  # length
    st.sampled_from([None, 0.0, 0.25, 0.5, 3.0]),  # blocks per SM
)


@given(st.lists(blocks_on_device, max_size=8), st.integers(0, 20), st.integers(1, 30))
def test_sm_efficiency_of_one_gpu(raw: list[Any], start: int, length: int) -> None:
    """The plugin's definition, nanosecond by nanosecond."""
    spans = [
        Span("k", Category.KERNEL, lane, at, for_ns, 0, {} if blocks is None else {"blocks_per_sm": blocks})
        for lane, at, for_ns, blocks in raw
    ]
    mine = [s for s in spans if s.lane != OTHER_GPU and s.extra.get("blocks_per_sm", 0) > 0]
    mine = [s for s in mine if s.end > start and s.start < start + length]
    running = [
        min(1.0, sum(s.extra["blocks_per_sm"] for s in mine if s.start <= t < s.end))
        for t in range(start, start + length)
    ]
    expected = pytest.approx(sum(running) / length) if mine else None
    assert est_sm_efficiency(timeline(spans), LANES[STREAM].process, (start, start + length)) == expected
