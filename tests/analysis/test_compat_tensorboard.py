"""The TensorBoard plugin's figures: against a count of single nanoseconds, and against the plugin's own results."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.analysis.compat.tensorboard import PARTS, tensorboard
from gpulab.run import Category
from tests.support import loaded_traces
from tests.support.paths import TESTS
from tests.support.timelines import BACKWARD, DEVICE, LANES, MAIN, OTHER_GPU, STREAM, STREAM_2, Span, timeline

FIGURES: dict[str, Any] = json.loads((TESTS / "golden" / "peer_figures.json").read_text())
NCCL = "nccl:all_reduce"
FETCH = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"

# the host runs operators, each with at most one launch within it
host_calls = st.lists(
    st.tuples(
        st.integers(0, 3),  # gap before it
        st.integers(1, 12),  # its length
        st.sampled_from(["aten::mm", FETCH, NCCL, "cudaLaunchKernel", "mark"]),
        st.booleans(),  # whether it launches
        st.integers(-4, 15),  # from the launch's end to the start on the device
        st.integers(0, 9),  # length on the device
        st.sampled_from([*DEVICE, Category.KERNEL]),
        st.sampled_from([STREAM, STREAM_2]),
        st.sampled_from([0.0, 0.25, 0.5, 3.0]),  # blocks per SM
    ),
    min_size=1,
    max_size=14,
)


def made(calls: list[Any], cuts: list[int]) -> list[Span]:
    """Spans of a host that makes the calls one after the other, in steps ending at every call numbered in `cuts`."""
    spans, at, began, step = [], 0, 0, 1
    for i, (gap, length, name, launches, delay, device_length, category, lane, blocks) in enumerate(calls, start=1):
        at += gap
        kind = Category.USER_ANNOTATION if name in (FETCH, "mark") else Category.CPU_OP
        kind = Category.CUDA_RUNTIME if name == "cudaLaunchKernel" else kind
        spans.append(Span(name, kind, MAIN, at, length, i if kind == Category.CUDA_RUNTIME else 0))
        launch_end = at + length
        if kind != Category.CUDA_RUNTIME and launches:
            spans.append(Span("cudaLaunchKernel", Category.CUDA_RUNTIME, MAIN, at, length, i))
        if kind == Category.CUDA_RUNTIME or launches:
            extra = {"blocks_per_sm": blocks, "occupancy_pct": 10 * blocks} if category == Category.KERNEL else {}
            spans.append(Span(f"item{i}", category, lane, max(0, launch_end + delay), device_length, i, extra))
        at = launch_end
        if i in cuts:
            spans.append(Span(f"ProfilerStep#{step}", Category.USER_ANNOTATION, MAIN, began, at - began))
            began, step = at, step + 1
    return spans


def dumb_steps(spans: list[Span]) -> list[tuple[int, int]]:
    """The plugin's steps, step by step and item by item."""
    marks = sorted((s.start, s.end) for s in spans if s.name.startswith("ProfilerStep#"))
    if not marks:
        operators = [s for s in spans if s.category == Category.CPU_OP]
        marks = [(min(s.start for s in operators), max(s.end for s in operators))]
    items = [s for s in spans if s.category in DEVICE]
    calls = {s.correlation: s for s in spans if s.category == Category.CUDA_RUNTIME}
    launched: list[list[Span]] = [
        [i for i in items if start <= calls[i.correlation].start and calls[i.correlation].end <= end]
        for start, end in marks
    ]
    inside = [i for step in launched for i in step]
    if not inside:
        return marks
    before = marks[0][0]
    if launched[0]:
        first = min(i.start for i in launched[0])
        before = max([before] + [i.end for i in items if i not in inside and i.end < first])
    found = []
    for (start, end), mine in zip(marks, launched, strict=True):
        start = max(before, start)
        before = max([start, end] + [i.end for i in mine])
        found.append((start, before))
    if len(found) > 1:
        while not launched[-1]:
            launched.pop(), found.pop()
        if len(found) > 1 and len(launched[-2]) * 0.8 > len(launched[-1]):
            found.pop()
    return found


def part_at(t: int, spans: list[Span]) -> str:
    """The part of one nanosecond, straight from the list of priorities."""
    here = [s for s in spans if s.start <= t < s.end]
    operator_of = {s.correlation: owner(s, spans) for s in spans if s.category == Category.CUDA_RUNTIME}
    kernels = [s for s in here if s.category == Category.KERNEL]
    collective = [s for s in kernels if operator_of[s.correlation] == NCCL]
    host = [s for s in here if s.category in (Category.CPU_OP, Category.USER_ANNOTATION)]
    host = [s for s in host if not s.name.startswith("ProfilerStep#")]
    if len(kernels) > len(collective):
        return "kernel"
    for category, part in ((Category.GPU_MEMCPY, "memcpy"), (Category.GPU_MEMSET, "memset")):
        if any(s.category == category for s in here):
            return part
    if collective or any(s.name == NCCL for s in host):
        return "communication"
    if any(s.category == Category.CUDA_RUNTIME for s in here):
        return "runtime"
    if any(s.name == FETCH for s in host):
        return "dataloader"
    return "cpu_exec" if host else "other"


def owner(call: Span, spans: list[Span]) -> str | None:
    """The name of the shortest operator around a call."""
    around = [s for s in spans if s.category == Category.CPU_OP and s.start <= call.start < s.end]
    return min(around, key=lambda s: s.duration).name if around else None


@given(host_calls, st.sets(st.integers(1, 14), max_size=4))
def test_steps_and_their_parts(calls: list[Any], cuts: set[int]) -> None:
    spans = made(calls, sorted(cuts))
    view = tensorboard(timeline(spans))
    if not any(s.name.startswith("ProfilerStep#") or s.category == Category.CPU_OP for s in spans):
        assert view is None
        return
    assert view is not None
    steps = dumb_steps(spans)
    assert list(view.steps_ns) == steps
    points = [part_at(t, spans) for start, end in steps for t in range(start, end)]
    for part in PARTS:
        assert view.step_us[part] == pytest.approx(points.count(part) / len(steps) / 1e3)
    assert view.step_us["total"] == pytest.approx(len(points) / len(steps) / 1e3)
    assert sum(view.step_us[part] for part in PARTS) == pytest.approx(view.step_us["total"])


@given(host_calls, st.sets(st.integers(1, 14), min_size=1, max_size=4))
def test_use_of_the_gpu(calls: list[Any], cuts: set[int]) -> None:
    spans = made(calls, sorted(cuts))
    view = tensorboard(timeline(spans))
    kernels = [s for s in spans if s.category == Category.KERNEL]
    if view is None or not kernels or view.steps_ns[-1][1] == view.steps_ns[0][0]:
        return
    moments = range(view.steps_ns[0][0], view.steps_ns[-1][1])
    running = [[s for s in kernels if s.start <= t < s.end] for t in moments]
    assert view.gpu_utilization == pytest.approx(sum(map(bool, running)) / len(moments))
    blocks = [min(1.0, sum(s.extra["blocks_per_sm"] for s in now)) for now in running]
    if any(s.extra["blocks_per_sm"] > 0 for now in running for s in now):
        assert view.est_sm_efficiency == pytest.approx(sum(blocks) / len(moments))
    occupancies = [s.extra["occupancy_pct"] for now in running for s in now]
    mean = sum(occupancies) / len(occupancies) if occupancies else None
    assert view.est_achieved_occupancy_pct == (pytest.approx(mean) if mean is not None else None)


def test_each_gpu_has_its_own_figures() -> None:
    spans = [
        Span("ProfilerStep#1", Category.USER_ANNOTATION, MAIN, 0, 100),
        Span("k", Category.KERNEL, STREAM, 0, 40),
        Span("k", Category.KERNEL, STREAM_2, 20, 40),
        Span("k", Category.KERNEL, OTHER_GPU, 0, 10),
    ]
    view = tensorboard(timeline(spans))
    assert view is not None
    assert {gpu: use.gpu_utilization for gpu, use in view.devices.items()} == {0: 0.6, 1: 0.1}
    assert view.gpu_utilization == 0.6
    assert LANES[OTHER_GPU].process == 1


def test_what_a_trace_does_not_have_is_not_measurable() -> None:
    spans = [
        Span("ProfilerStep#1", Category.USER_ANNOTATION, MAIN, 0, 100),
        Span("k", Category.KERNEL, STREAM, 0, 40),
    ]
    without_blocks = tensorboard(timeline(spans))
    assert without_blocks is not None
    assert without_blocks.gpu_utilization == 0.4
    assert without_blocks.est_sm_efficiency is None
    assert without_blocks.est_achieved_occupancy_pct is None
    without_gpu = tensorboard(timeline(spans[:1]))
    assert without_gpu is not None
    assert without_gpu.gpu_utilization is None
    assert without_gpu.step_us["other"] == pytest.approx(0.1)
    assert tensorboard(timeline([])) is None


def test_a_step_marked_again_on_the_device_counts_once() -> None:
    spans = [
        Span("ProfilerStep#1", Category.USER_ANNOTATION, MAIN, 0, 100),
        Span("ProfilerStep#1", Category.GPU_USER_ANNOTATION, STREAM, 10, 200),
        Span("aten::mm", Category.CPU_OP, BACKWARD, 10, 20),
    ]
    view = tensorboard(timeline(spans))
    assert view is not None
    assert view.steps_ns == ((0, 100),)
    assert not view.whole_window


@pytest.mark.parametrize(("launched", "kept"), [((2, 1), 1), ((5, 4), 2), ((5, 3), 1), ((3, 0), 1), ((0, 3), 2)])
def test_a_last_step_with_too_few_items_is_not_trusted(launched: tuple[int, int], kept: int) -> None:
    """Below 0.8 of the step before it."""
    call = (0, 4, "cudaLaunchKernel", True, 0, 1, Category.KERNEL, STREAM, 1.0)
    idle = (0, 4, "aten::view", False, 0, 1, Category.KERNEL, STREAM, 1.0)
    calls = [*([call] * launched[0] or [idle]), *([call] * launched[1] or [idle])]
    view = tensorboard(timeline(made(calls, [max(1, launched[0]), len(calls)])))
    assert view is not None
    assert len(view.steps_ns) == kept


@pytest.mark.parametrize("name", loaded_traces.ALL)
def test_real_traces_give_the_plugins_own_figures(name: str) -> None:
    """As torch_tb_profiler's last source computes them, the copies of steps on the device left out."""
    theirs = FIGURES[name]["tensorboard"]
    view = tensorboard(loaded_traces.trace(name).timeline)
    assert view is not None
    assert len(view.steps_ns) == theirs["steps"]
    assert view.gpu_utilization == pytest.approx(theirs["gpu_utilization"], abs=1e-4)
    assert view.est_sm_efficiency == pytest.approx(theirs["est_sm_efficiency"], abs=1e-4)
    assert view.est_achieved_occupancy_pct == pytest.approx(theirs["est_achieved_occupancy_pct"], abs=0.01)
    assert view.step_us == pytest.approx(theirs["step_us"], rel=0.005, abs=0.15)


@pytest.mark.parametrize(
    ("name", "utilization", "efficiency", "occupancy"),
    [
        ("v100_resnet50_workers0", 0.5551, 0.5468, 49.13),
        ("v100_resnet50_workers4", 0.6935, None, None),
        ("a100_8ranks_rank3", 0.794, 0.592, 32.5),
        ("v100_ddp_healthy", 0.968, None, None),
        ("h100_owlv2_starved", 0.455, 0.449, 57.9),
        ("b200_moe_launch_bound", 0.125, None, None),
        ("mi300_resnet_healthy", 0.965, None, None),
    ],
)
def test_real_traces_give_the_published_figures(
    name: str, utilization: float, efficiency: float | None, occupancy: float | None
) -> None:
    """Those of the table that came with the traces."""
    view = tensorboard(loaded_traces.trace(name).timeline)
    assert view is not None
    assert view.gpu_utilization == pytest.approx(utilization, abs=0.0006)
    if efficiency is not None:
        assert view.est_sm_efficiency == pytest.approx(efficiency, abs=0.0006)
        assert view.est_achieved_occupancy_pct == pytest.approx(occupancy, abs=0.06)
    if name == "mi300_resnet_healthy":
        assert view.est_sm_efficiency is None and view.est_achieved_occupancy_pct is None


def test_waiting_for_data_is_seen_on_a_modern_trace() -> None:
    """The plugin's release 0.4.3 shows 0 here."""
    view = tensorboard(loaded_traces.trace("h100_owlv2_starved").timeline)
    assert view is not None
    assert view.step_us["dataloader"] / view.step_us["total"] == pytest.approx(0.511, abs=0.001)


def test_time_zero_does_not_matter() -> None:
    here = timeline(made([(1, 5, "aten::mm", True, 3, 4, Category.KERNEL, STREAM, 0.5)] * 4, [2, 4]))
    there = replace(here, start_ns=here.start_ns + np.int64(10**18 + 7))
    first, second = tensorboard(here), tensorboard(there)
    assert first is not None and second is not None
    assert first.step_us == second.step_us
    assert first.devices == second.devices
