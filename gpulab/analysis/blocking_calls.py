"""Finds where CPU and GPU wait for each other: calls that block on the GPU, and operators that the CPU computes alone.

Blocking calls read results back, upload from pageable memory, or only wait. While the host waits it launches nothing,
so the device runs out of work after each such call. The cost of a call has two upper bounds: the host's time in the
call, and the device's idle time that no wait for data explains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from msgspec import Struct

from gpulab.analysis.kernels import DeviceWork
from gpulab.intervals import EMPTY, Intervals, covers, intersect, joined, subtract, union
from gpulab.run import Int64, Timeline
from gpulab.timeline.labels import CALLS, OPERATORS, WAITS, WORK, What, labels, matched
from gpulab.timeline.launches import replay_times

if TYPE_CHECKING:
    from gpulab.analysis.facts import Facts

Direction = Literal["read", "upload", "wait"]
DIRECTIONS: tuple[Direction, ...] = ("read", "upload", "wait")

# A copy call that returns sooner has only started the copy (definitions.md, "Step on a GPU"). A copy into
# pageable memory returns when it is done, however short it is (CUDA's documentation: API synchronization).
STARTED_NS = 20_000

# Operators that a person writes: if several are open at a call, the outermost of these is named.
_BY_PERSON = (
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::equal",
    "aten::allclose",
    "aten::masked_select",
    "aten::unique",
    "aten::_unique2",
    "aten::to",
    "aten::cpu",
    "aten::_to_copy",
    "aten::copy_",
)


class BlockingCalls(Struct, frozen=True):
    """All calls of one direction in the steps. Times are µs per step (medians).

    `waited_us` is the host's time in the calls. `idle_us` is the device's idle time from the begin of each call to the
    first work that was started after it, without the time in which the loop waits for data. `operators` are those that
    made the calls, with calls per step, the longest wait first. `times` are the calls themselves, merged.
    """

    direction: Direction
    per_step: float
    waited_us: float
    idle_us: float
    operators: tuple[tuple[str, float], ...]
    times: Intervals


def blocking_calls(facts: Facts) -> tuple[BlockingCalls, ...]:
    """The calls of each direction that occurs, the longest wait first; empty without a GPU's trace."""
    work = facts.work
    if work is None:
        return ()
    t = work.timeline
    calls = np.flatnonzero(t.training(*WAITS, What.COPY_CALL))
    calls = calls[covers(work.host_windows, t.start_ns[calls])]
    direction, operator_id = _direction(work, calls), _operators_of(work, calls)
    by_direction = []
    for i, name in enumerate(DIRECTIONS):
        mine = direction == i
        if mine.any():
            by_direction.append(_summed(work, name, calls[mine], operator_id[mine]))
    return tuple(sorted(by_direction, key=lambda b: -b.waited_us))


def _direction(work: DeviceWork, calls: Int64) -> Int64:
    """Index into DIRECTIONS for each call; -1 for those that only start something."""
    t = work.timeline
    copying = t.what[calls] == What.COPY_CALL
    started = t.duration_ns[calls] < STARTED_NS
    kind = np.full(len(calls), -1, dtype=np.int64)
    items = t.rows(What.COPY)
    copied = np.full(len(t), -1, dtype=np.int64)
    item, call = matched(t, items, calls)
    copied[call] = item
    of_copy = copied[calls]
    read = t.named(lambda name: name.startswith("Memcpy DtoH"))
    upload = t.named(lambda name: name.startswith("Memcpy HtoD (Pageable"))
    kind[(of_copy >= 0) & read[of_copy]] = DIRECTIONS.index("read")
    kind[(of_copy >= 0) & upload[of_copy]] = DIRECTIONS.index("upload")
    operator = work.tree.innermost(t, calls)
    of_operator = np.full(len(t) + 1, -1, dtype=np.int64)
    of_operator[operator[kind >= 0]] = kind[kind >= 0]
    of_operator[-1] = -1
    waiting = ~copying
    kind[waiting] = np.where(of_operator[operator] >= 0, of_operator[operator], DIRECTIONS.index("wait"))[waiting]
    returns_done = t.named(lambda name: name.startswith("Memcpy DtoH (Device -> Pageable"))
    kind[copying & started & ~((of_copy >= 0) & returns_done[of_copy])] = -1
    return kind


def _operators_of(work: DeviceWork, calls: Int64) -> Int64:
    """For each call the operator that a person wrote, as index into the timeline's names; -1 for none."""
    t, tree = work.timeline, work.tree
    if not len(tree.rows):
        return np.full(len(calls), -1, dtype=np.int64)
    position = np.full(len(t) + 1, -1, dtype=np.int64)
    position[tree.rows] = np.arange(len(tree.rows))
    innermost = tree.innermost(t, calls)
    at = np.where(innermost >= 0, position[innermost], -1)
    name = np.where(at >= 0, t.name_id[tree.rows[at]], -1).astype(np.int64)
    is_by_person = np.zeros(len(t.names), dtype=bool)
    is_by_person[[i for i, n in enumerate(t.names) if n in _BY_PERSON]] = True
    while (at >= 0).any():
        of_row = np.where(at >= 0, t.name_id[tree.rows[at]], 0)
        name = np.where((at >= 0) & is_by_person[of_row], of_row, name)
        at = np.where(at >= 0, tree.parent[at], -1)
    return name


def _summed(work: DeviceWork, direction: Direction, calls: Int64, operator_id: Int64) -> BlockingCalls:
    t = work.timeline
    times = union(t.start_ns[calls], t.end_ns[calls])
    waited = np.bincount(operator_id + 1, weights=t.duration_ns[calls], minlength=len(t.names) + 1)
    count = np.bincount(operator_id + 1, minlength=len(t.names) + 1)
    names = ("", *t.names)
    order = [i for i in np.argsort(-waited, kind="stable").tolist() if count[i]]
    return BlockingCalls(
        direction=direction,
        per_step=len(calls) / work.steps,
        waited_us=work.host_per_step_us(times),
        idle_us=work.per_step_us(_dry(work, calls)),
        operators=tuple((names[i], float(count[i]) / work.steps) for i in order),
        times=times,
    )


def _dry(work: DeviceWork, calls: Int64) -> Intervals:
    """Idle time from the begin of each call to the first work started after its end, without waits for data."""
    t = work.timeline
    launched = work.call >= 0
    order = np.argsort(t.start_ns[work.call[launched]], kind="stable")
    launch_ns = t.start_ns[work.call[launched]][order]
    begun = t.start_ns[work.rows[launched]][order]
    after = np.searchsorted(launch_ns, t.end_ns[calls], side="left")
    last = int(work.windows[-1, 1]) if len(work.windows) else 0
    until = np.append(begun, last)[np.minimum(after, len(begun))]
    dry = intersect(work.idle, union(t.start_ns[calls], np.maximum(until, t.end_ns[calls])))
    replays = joined(*(replay_times(t, index) for index in t.devices))
    return subtract(subtract(dry, t.loading), replays)


# Operators in which models spend their time: one that starts nothing on the GPU computes on the CPU.
_HEAVY = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mkldnn_convolution", "aten::_convolution",
    "aten::convolution_backward", "aten::mkldnn_linear", "aten::native_batch_norm", "aten::native_layer_norm",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::embedding_dense_backward", "aten::_softmax",
)  # fmt: skip


def computing_on_cpu(timeline: Timeline) -> tuple[Intervals, str]:
    """When the training computes on the CPU while no GPU works, and the operator that takes most of it."""
    spans = labels(timeline)
    rows = np.flatnonzero(spans.training(*OPERATORS) & spans.named(_HEAVY.__contains__))
    calls = spans.start_ns[spans.of(*CALLS)]
    started = np.searchsorted(calls, spans.end_ns[rows]) - np.searchsorted(calls, spans.start_ns[rows])
    rows = rows[started == 0]
    if not len(rows):
        return EMPTY, ""
    loading, busy = spans.times(spans.of(What.LOADER)), spans.times(spans.of(*WORK))
    totals = np.bincount(timeline.name_id[rows], weights=timeline.duration_ns[rows], minlength=len(timeline.names))
    return subtract(subtract(spans.times(rows), loading), busy), timeline.names[int(totals.argmax())]
