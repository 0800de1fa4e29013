"""The figures of the PyTorch Profiler plugin for TensorBoard under its own names, so that its users find them again.

The plugin (torch-tb-profiler, `tb_plugin` in Kineto) was removed from Kineto in April 2026; its last source is what is
followed here. Its known faults are kept where they make the figure (NCCL kernels count as "Kernel" unless an operator
of the plugin's own list launched them) and left out where they only double (steps marked again on the device).
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gpulab.intervals import Intervals, clip, measure, paint, union
from gpulab.run import Category, Float64, Int64, Timeline
from gpulab.timeline import spans
from gpulab.timeline.launches import CallTree, launch_of

PARTS = ("kernel", "memcpy", "memset", "communication", "runtime", "dataloader", "cpu_exec", "other")

COLLECTIVES = tuple(
    f"{library}:{name}"
    for library in ("nccl", "gloo")
    for name in ("broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter")
)  # NcclOpNameSet and GlooOpNameSet of the plugin

UNDERFILLED_LAST_STEP = 0.8  # the plugin drops a last step with less than this share of the device items before it


class DeviceUse(Struct, frozen=True):
    """One GPU between the first step's start and the last step's end; None is "not measurable".

    gpu_utilization: share of that time covered by kernels. est_sm_efficiency: the mean over that time of the blocks
    per SM of the kernels then running, at most 1. est_achieved_occupancy_pct: mean over kernels, weighted by duration.
    """

    gpu_utilization: float
    est_sm_efficiency: float | None
    est_achieved_occupancy_pct: float | None


class TensorBoardView(Struct, frozen=True):
    """What the plugin's overview shows.

    `step_us`: mean per step of each of `PARTS` and "total", in microseconds. `steps_ns`: the steps as the plugin bounds
    them, each from the end of the one before to the end of the last item it launched. `devices`: by device index, GPUs
    with kernels only. `whole_window`: there was no step mark, all operators count as one step.
    """

    gpu_utilization: float | None  # of the first GPU, 0–1, as the next
    est_sm_efficiency: float | None
    est_achieved_occupancy_pct: float | None  # of the first GPU, 0–100
    step_us: dict[str, float]
    steps_ns: tuple[tuple[int, int], ...]
    devices: dict[int, DeviceUse]
    whole_window: bool


def tensorboard(timeline: Timeline) -> TensorBoardView | None:
    """The plugin's overview of a timeline; None where there is neither a step nor an operator."""
    marked = _marked_steps(timeline)
    host = marked if len(marked) else _extent_of_operators(timeline)
    if len(host) == 0:
        return None
    steps = _with_device_side(timeline, host)
    devices = _devices(timeline, int(steps[0, 0]), int(steps[-1, 1]))
    first = devices[min(devices)] if devices else None
    return TensorBoardView(
        gpu_utilization=first.gpu_utilization if first else None,
        est_sm_efficiency=first.est_sm_efficiency if first else None,
        est_achieved_occupancy_pct=first.est_achieved_occupancy_pct if first else None,
        step_us=_step_us(timeline, steps),
        steps_ns=tuple((int(start), int(end)) for start, end in steps),
        devices=devices,
        whole_window=len(marked) == 0,
    )


def _marked_steps(timeline: Timeline) -> Int64:
    """Start and end of the host's ProfilerStep marks; their copies on the device would count each step twice."""
    marks = spans.in_category(timeline, Category.USER_ANNOTATION, Category.CPU_OP)
    rows = np.flatnonzero(marks & spans.named(timeline, spans.starting_with("ProfilerStep#")))
    return np.stack((timeline.start_ns[rows], timeline.end_ns[rows]), axis=1)


def _extent_of_operators(timeline: Timeline) -> Int64:
    rows = np.flatnonzero(spans.in_category(timeline, Category.CPU_OP))
    if len(rows) == 0:
        return np.empty((0, 2), dtype=np.int64)
    return np.array([[timeline.start_ns[rows[0]], timeline.end_ns[rows].max()]], dtype=np.int64)


def _with_device_side(timeline: Timeline, host: Int64) -> Int64:
    """The steps as the plugin draws them: what a step launched belongs to it, and the next one begins after that.

    A step's runtime calls lie wholly in it. The first step begins after the last item that no step launched and that
    ended before its own first item. Steps at the end that launched nothing are dropped, and so is a last one that is
    underfilled.
    """
    items = np.flatnonzero(spans.device_items(timeline))
    step = _launching_step(timeline, items, host)
    inside = step >= 0
    if not inside.any():
        return host
    count = np.bincount(step[inside], minlength=len(host))
    far = np.iinfo(np.int64)
    first_start, last_end = np.full(len(host), far.max), np.full(len(host), far.min)
    np.minimum.at(first_start, step[inside], timeline.start_ns[items[inside]])
    np.maximum.at(last_end, step[inside], timeline.end_ns[items[inside]])
    before = int(host[0, 0])
    if count[0]:
        strays = timeline.end_ns[items[~inside]]
        before = max(before, int(strays[strays < first_start[0]].max(initial=before)))
    steps = host.copy()
    for i in range(len(steps)):
        steps[i, 0] = max(before, int(steps[i, 0]))
        steps[i, 1] = before = max(int(steps[i, 0]), int(steps[i, 1]), int(last_end[i]))
    return steps[: _trusted(count)]


def _launching_step(timeline: Timeline, items: Int64, host: Int64) -> Int64:
    """The step that holds the runtime call that launched each item; -1 where none does."""
    call = launch_of(timeline, items, (Category.CUDA_RUNTIME,))
    step = np.searchsorted(host[:, 0], timeline.start_ns[call], side="right") - 1
    held = (call >= 0) & (step >= 0) & (timeline.end_ns[call] <= host[np.maximum(step, 0), 1])
    return np.where(held, step, -1)


def _trusted(count: Int64) -> int:
    """How many steps to keep, by the number of items on the device each launched."""
    if len(count) == 1:
        return 1
    last = int(np.flatnonzero(count)[-1])
    underfilled = last > 0 and count[last - 1] * UNDERFILLED_LAST_STEP > count[last]
    return last if underfilled else last + 1


def _step_us(timeline: Timeline, steps: Int64) -> dict[str, float]:
    """Mean time per step of each part; where several apply to a moment the first of `PARTS` takes it."""
    totals = paint(steps, [clip(layer, int(steps[0, 0]), int(steps[-1, 1])) for layer in _layers(timeline)])
    mean_us = totals.sum(axis=0) / len(steps) / 1e3
    return {**dict(zip(PARTS, mean_us.tolist(), strict=True)), "total": float(mean_us.sum())}


def _layers(timeline: Timeline) -> list[Intervals]:
    """What covers which time, in the order of `PARTS` without "other"."""
    kernel, annotation, operator = (
        spans.in_category(timeline, c) for c in (Category.KERNEL, Category.USER_ANNOTATION, Category.CPU_OP)
    )
    collective_kernel = _launched_by_collectives(timeline)
    collective = (annotation | operator) & spans.named(timeline, COLLECTIVES.__contains__)
    loader = (annotation | operator) & spans.named(timeline, _is_fetch)
    step = spans.named(timeline, spans.starting_with("ProfilerStep#"))
    masks = (
        kernel & ~collective_kernel,
        spans.in_category(timeline, Category.GPU_MEMCPY),
        spans.in_category(timeline, Category.GPU_MEMSET),
        collective_kernel | collective,
        spans.in_category(timeline, Category.CUDA_RUNTIME),
        loader,
        (annotation | operator) & ~collective & ~loader & ~step,
    )
    return [spans.covered(timeline, mask) for mask in masks]


def _is_fetch(name: str) -> bool:
    """A DataLoader's `__next__` or a DataPipe at work."""
    fetches = name.startswith("enumerate(DataLoader)#") and name.endswith(".__next__")
    return fetches or name.startswith("enumerate(DataPipe)#")


def _launched_by_collectives(timeline: Timeline) -> spans.Mask:
    """Kernels whose innermost operator is one of `COLLECTIVES`: true of old traces only.

    Newer PyTorch marks collectives by annotations, which do not own the launches within them.
    """
    chosen = np.zeros(len(timeline), dtype=bool)
    operator = spans.in_category(timeline, Category.CPU_OP)
    collective = operator & spans.named(timeline, COLLECTIVES.__contains__)
    if not collective.any():
        return chosen
    kernels = np.flatnonzero(spans.in_category(timeline, Category.KERNEL))
    call = launch_of(timeline, kernels)
    kernels, call = kernels[call >= 0], call[call >= 0]
    owner = CallTree.of(timeline, np.flatnonzero(operator)).innermost(timeline, call)
    chosen[kernels[(owner >= 0) & collective[owner]]] = True
    return chosen


def _devices(timeline: Timeline, start: int, end: int) -> dict[int, DeviceUse]:
    """Each GPU with kernels, within [start, end)."""
    if end <= start:
        return {}
    device_of_lane = np.array([lane.process for lane in timeline.lanes], dtype=np.int64)
    kernels = np.flatnonzero(spans.in_category(timeline, Category.KERNEL))
    device = device_of_lane[timeline.lane_id[kernels]] if len(kernels) else kernels
    return {int(d): _device_use(timeline, kernels[device == d], start, end) for d in np.unique(device)}


def _device_use(timeline: Timeline, kernels: Int64, start: int, end: int) -> DeviceUse:
    begins, ends = timeline.start_ns[kernels], timeline.end_ns[kernels]
    inside = np.maximum(0, np.minimum(ends, end) - np.maximum(begins, start))
    return DeviceUse(
        gpu_utilization=measure(clip(union(begins, ends), start, end)) / (end - start),
        est_sm_efficiency=_sm_efficiency(_extra(timeline, "blocks_per_sm", kernels), begins, ends, start, end),
        est_achieved_occupancy_pct=_weighted_mean(_extra(timeline, "occupancy_pct", kernels), inside),
    )


def _extra(timeline: Timeline, name: str, rows: Int64) -> Float64:
    """An optional column of those rows; NaN where the trace does not have it."""
    column = timeline.extra.get(name)
    return np.full(len(rows), np.nan) if column is None else column[rows]


def _sm_efficiency(blocks_per_sm: Float64, begins: Int64, ends: Int64, start: int, end: int) -> float | None:
    """Blocks per SM of the kernels running together are added up, at most 1 is counted, the mean is over all time."""
    recorded = blocks_per_sm > 0
    if not (recorded & (ends > start) & (begins < end)).any():
        return None
    edges = np.concatenate((begins[recorded], ends[recorded]))
    change = np.concatenate((blocks_per_sm[recorded], -blocks_per_sm[recorded]))
    order = np.argsort(edges, kind="stable")
    running = np.clip(np.cumsum(change[order])[:-1], 0.0, 1.0)
    length = np.diff(np.clip(edges[order], start, end))
    return float((running * length).sum() / (end - start))


def _weighted_mean(values: Float64, weight: Int64) -> float | None:
    """None where no value is known, or none has weight."""
    recorded = (values >= 0) & (weight > 0)
    total = int(weight[recorded].sum())
    return float((values[recorded] * weight[recorded]).sum() / total) if total else None
