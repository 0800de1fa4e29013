"""What the profiled steps spent their time on, by operator and by kernel name, per step: the tables of a report."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gpulab.analysis.breakdown import Breakdown, layers
from gpulab.analysis.gpu.device_work import names_tell
from gpulab.analysis.gpu.kernels import launched_ns
from gpulab.intervals import covers, intersect, joined, median_share, subtract, union_of
from gpulab.run import Category, Int64, Run, Timeline
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


_OWNERS = (  # by how a library begins the names of its annotations
    ("[pl]", "Lightning's"),
    ("FullyShardedDataParallel", "FSDP's"),
    ("FSDP::", "FSDP's"),
    ("DistributedDataParallel", "DistributedDataParallel's"),
    ("nccl:", "torch.distributed's"),
    ("gloo:", "torch.distributed's"),
    ("c10d::", "torch.distributed's"),
    ("## Call CompiledFxGraph", "torch.compile's"),
)


class Annotated(Struct, frozen=True):
    """`name` as the program gave it; `share`: median over the steps of what lies in it without an operator."""

    name: str
    share: float

    @property
    def words(self) -> str:
        """As it is called in a sentence: `your annotation "forward"`."""
        owner = next((owner for prefix, owner in _OWNERS if self.name.startswith(prefix)), "your")
        return f'{owner} annotation "{self.name}"'


def unknown_by_annotation(run: Run, account: Breakdown, *, idle_causes: bool = True) -> tuple[Annotated, ...]:
    """The largest first. Empty where the causes of idle time are withheld: then all of it is unknown anyway."""
    timeline = run.timeline
    if timeline is None or not account.steps or not idle_causes:
        return ()
    rows = np.flatnonzero(spans.structure(timeline) & spans.on_training_thread(timeline))
    if not len(rows):
        return ()
    claims = layers(timeline, account)
    bare = subtract(account.covered, joined(*claims.values()))
    within: dict[int, list[tuple[int, int]]] = {}
    for name_id, start, end in _innermost(timeline, rows):
        within.setdefault(name_id, []).append((start, end))
    shares = {
        name_id: median_share(account.windows, intersect(bare, union_of(times))) for name_id, times in within.items()
    }
    largest = sorted(shares, key=lambda name_id: -shares[name_id])
    return tuple(Annotated(timeline.names[i], shares[i]) for i in largest if shares[i] > 0)


def _innermost(timeline: Timeline, rows: spans.Rows) -> Iterator[tuple[int, int, int]]:
    """Name, start and end of the pieces in which a row is the innermost of these, which are in order of time."""
    opened: list[tuple[int, int]] = []  # name, end
    at = 0
    columns = (timeline.name_id[rows], timeline.start_ns[rows], timeline.end_ns[rows])
    for name_id, start, end in [*zip(*(c.tolist() for c in columns), strict=True), (-1, 1 << 62, 1 << 62)]:
        while opened and opened[-1][1] <= start:
            closed, until = opened.pop()
            yield closed, at, until
            at = max(at, until)
        if opened:
            yield opened[-1][0], at, start
        at = max(at, start)
        opened.append((name_id, end))
