"""What the profiled window spent its time on, by operator and by kernel name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpulab.analysis import spans
from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.nesting import parents
from gpulab.run import Category, Int64, Timeline


@dataclass(frozen=True, slots=True)
class CostRow:
    """One name: how often it ran per step, and its time per step.

    `self_us` is time in the span itself, without the spans nested in it (host) or the sum of a kernel's own durations
    (device). `share` is `self_us` over the steps' wall time; on a device with several streams shares may exceed 1.
    """

    name: str
    calls_per_step: float
    self_us: float
    total_us: float
    share: float


def operators(timeline: Timeline, account: Breakdown) -> tuple[CostRow, ...]:
    """Host operators and annotations of the training threads, by self time, costliest first."""
    host = spans.in_category(timeline, Category.CPU_OP, Category.USER_ANNOTATION)
    mine = np.flatnonzero(host & spans.on_training_threads(timeline) & ~spans.named(timeline, spans.is_step))
    return _table(timeline, mine, self_ns(timeline, mine), account)


def kernels(timeline: Timeline, account: Breakdown) -> tuple[CostRow, ...]:
    """Kernels, copies and memsets contained in the steps, by name, costliest first."""
    rows = np.flatnonzero(spans.in_category(timeline, Category.KERNEL, Category.GPU_MEMCPY, Category.GPU_MEMSET))
    return _table(timeline, rows, timeline.duration_ns[rows], account)


def self_ns(timeline: Timeline, rows: npt.NDArray[np.intp]) -> Int64:
    """For each row: its duration without that of the rows nested directly in it, lane by lane.

    `rows` is in the timeline's order, so a parent comes before its children.
    """
    own: Int64 = timeline.duration_ns[rows].copy()
    for lane in np.unique(timeline.lane_id[rows]).tolist():
        at = np.flatnonzero((timeline.lane_id[rows] == lane) & (own > 0))  # a span of no length takes nothing away
        parent = parents(timeline.start_ns[rows[at]], timeline.end_ns[rows[at]])
        held = parent >= 0
        taken = np.bincount(parent[held], weights=timeline.duration_ns[rows[at[held]]], minlength=len(at))
        own[at] -= taken.astype(np.int64)
    return np.maximum(own, 0)


def _table(timeline: Timeline, rows: npt.NDArray[np.intp], own_ns: Int64, account: Breakdown) -> tuple[CostRow, ...]:
    """Sum by name over the rows that start inside an accounted step."""
    edges = np.array([(s.start_ns, s.end_ns) for s in account.steps], dtype=np.int64)
    start = timeline.start_ns[rows]
    step = np.searchsorted(edges[:, 0], start, side="right") - 1
    inside = (step >= 0) & (start < edges[np.maximum(step, 0), 1])
    rows, own_ns = rows[inside], own_ns[inside]
    n_steps, wall_ns = len(edges), int((edges[:, 1] - edges[:, 0]).sum()) or 1
    size = len(timeline.names)
    calls = np.bincount(timeline.name_id[rows], minlength=size)
    own = np.bincount(timeline.name_id[rows], weights=own_ns, minlength=size)
    total = np.bincount(timeline.name_id[rows], weights=timeline.duration_ns[rows], minlength=size)
    order = [int(i) for i in np.argsort(-own, kind="stable") if calls[i]]
    return tuple(
        CostRow(
            name=timeline.names[i],
            calls_per_step=float(calls[i] / n_steps),
            self_us=float(own[i] / n_steps / 1e3),
            total_us=float(total[i] / n_steps / 1e3),
            share=float(own[i] / wall_ns),
        )
        for i in order
    )
