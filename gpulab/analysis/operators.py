"""What the profiled steps spent their time on, by operator and by kernel name, per step: the tables of a report."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.gpu.device_work import names_tell
from gpulab.analysis.gpu.kernels import launched_ns
from gpulab.intervals import covers
from gpulab.run import Category, Int64, Timeline
from gpulab.timeline import spans
from gpulab.timeline.device_steps import launched_within
from gpulab.timeline.kernel_names import reading
from gpulab.timeline.launches import CallTree


class CostRow(Struct, frozen=True):
    """One name: how often it ran per step, and its time per step.

    `self_us` is time in the span itself, without the spans nested in it (host) or the sum of a kernel's own durations
    (device). `share` is `self_us` over the steps' wall time; on a device with several streams shares may exceed 1.
    `device_us`, of an operator: time on the GPU of what it launched itself, wherever that ran. `tensor_core`, of a
    kernel: whether its name says that it uses tensor cores. None is "not measurable".
    """

    name: str
    calls_per_step: float
    self_us: float
    total_us: float
    share: float
    device_us: float | None = None
    tensor_core: bool | None = None


def operators(timeline: Timeline, account: Breakdown) -> tuple[CostRow, ...]:
    """Host operators and annotations of the training threads; costliest first, on the GPU where there is one."""
    named = spans.in_category(timeline, Category.CPU_OP, Category.USER_ANNOTATION)
    mine = np.flatnonzero(named & spans.on_training_threads(timeline) & ~spans.named(timeline, spans.is_step))
    tree = CallTree.of(timeline, mine)
    own = np.zeros(len(timeline), dtype=np.int64)
    own[tree.rows] = tree.self_ns(timeline)
    device = launched_ns(timeline, tree) if timeline.has_device_events else None
    mine = mine[covers(account.host_windows, timeline.start_ns[mine])]
    rows = _table(timeline, mine, own, account, device)
    return tuple(sorted(rows, key=lambda row: (-(row.device_us or 0), -row.self_us)))


def kernels(timeline: Timeline, account: Breakdown) -> tuple[CostRow, ...]:
    """Kernels, copies and memsets that the steps launched on the accounted device, by name, costliest first."""
    rows = np.flatnonzero(spans.device_items(timeline, account.device_index or 0))
    rows = rows[launched_within(timeline, rows, account.host_windows, account.windows)]
    return _table(timeline, rows, timeline.duration_ns, account, None)


def _table(
    timeline: Timeline, rows: npt.NDArray[np.intp], own_ns: Int64, account: Breakdown, device_ns: Int64 | None
) -> tuple[CostRow, ...]:
    """Sum by name over these rows."""
    n_steps, wall_ns = len(account.steps), account.wall_ns or 1
    size, names = len(timeline.names), timeline.name_id[rows]

    def by_name(column: Int64 | None) -> npt.NDArray[np.float64]:
        weights = np.ones(len(rows)) if column is None else column[rows]
        return np.bincount(names, weights=weights, minlength=size).astype(np.float64)

    calls, own, total = by_name(None), by_name(own_ns), by_name(timeline.duration_ns)
    device = None if device_ns is None else by_name(device_ns)
    tells_units = device_ns is None and names_tell(timeline)
    return tuple(
        CostRow(
            name=timeline.names[i],
            calls_per_step=float(calls[i] / n_steps),
            self_us=float(own[i] / n_steps / 1e3),
            total_us=float(total[i] / n_steps / 1e3),
            share=float(own[i] / wall_ns),
            device_us=None if device is None else float(device[i] / n_steps / 1e3),
            tensor_core=reading(timeline.names[i]).tensor_cores if tells_units else None,
        )
        for i in np.argsort(-own, kind="stable").tolist()
        if calls[i]
    )
