"""Computes what the profiled steps spend on operators: a table by name, the cost of calls, and work to be saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.kernels import DeviceWork, names_tell
from gpulab.intervals import (
    Intervals,
    closed,
    covers,
    intersect,
    joined,
    measure,
    median_share,
    subtract,
    union,
)
from gpulab.run import BackwardPass, Float64, Int64, Timeline
from gpulab.timeline.kernel_names import reading
from gpulab.timeline.labels import (
    CALLS,
    COLLECTIVES,
    EVALUATING,
    MARKS,
    NODES,
    OPERATOR_OF_NODE,
    OPERATORS,
    CallTree,
    Labels,
    Mask,
    What,
    Where,
    labels,
    plain_name,
)

if TYPE_CHECKING:
    from gpulab.analysis.facts import Facts


class CostRow(Struct, frozen=True):
    """One name: how often it ran per step, and its time per step.

    `self_us` is time in the span without nested spans (host), or the sum of a kernel's own durations (device). `share`
    is `self_us` over the steps' wall time; on a device with several streams shares may exceed 1. `device_us`, for
    operators: GPU time of the work that it launched itself, in whatever step that ran. `tensor_core`, for kernels:
    whether the name says that it uses tensor cores. None is "not measurable".
    """

    name: str
    calls_per_step: float
    self_us: float
    total_us: float
    share: float
    device_us: float | None = None
    tensor_core: bool | None = None


def operators(timeline: Timeline, account: Breakdown) -> tuple[CostRow, ...]:
    """Host operators and annotations of the training threads; costliest first, on the GPU if there is one."""
    spans = labels(timeline)
    rows = np.flatnonzero(spans.training(*OPERATORS, *COLLECTIVES, *MARKS))
    tree = CallTree.of(spans, rows)
    rows = rows[covers(account.host_windows, spans.start_ns[rows])]
    inside = covers(account.host_windows, spans.start_ns[tree.rows])
    own_ns = _by_name(spans, tree.rows[inside], tree.self_ns(spans)[inside])
    device_ns = None
    if spans.has_device_events:
        work = np.flatnonzero(spans.call >= 0)
        owner = tree.innermost(spans, spans.call[work])
        launched = (owner >= 0) & covers(account.host_windows, spans.start_ns[owner])
        device_ns = _by_name(spans, owner[launched], spans.duration_ns[work[launched]])
    table = _table(spans, rows, own_ns, account, device_ns)
    return tuple(sorted(table, key=lambda row: (-(row.device_us or 0), -row.self_us)))


def kernels(work: DeviceWork, account: Breakdown) -> tuple[CostRow, ...]:
    """Kernels, copies and memsets that the steps launched on the accounted device, by name, costliest first."""
    return _table(work.timeline, work.rows, _by_name(work.timeline, work.rows, work.duration_ns), account, None)


def _by_name(timeline: Timeline, rows: Int64, column: Int64 | None) -> Float64:
    """Sums of a figure of these rows, by name; without a `column` the number of rows."""
    sums: Float64 = np.bincount(timeline.name_id[rows], column, len(timeline.names)).astype(np.float64)
    return sums


def _table(
    timeline: Timeline, rows: Int64, own_ns: Float64, account: Breakdown, device_ns: Float64 | None
) -> tuple[CostRow, ...]:
    """By name: how often these rows occur and how long they take; `own_ns` and `device_ns` are sums by name."""
    n_steps, wall_ns = len(account.steps), account.wall_ns or 1
    calls, total_ns = _by_name(timeline, rows, None), _by_name(timeline, rows, timeline.duration_ns[rows])
    tells_units = device_ns is None and names_tell(timeline)
    return tuple(
        CostRow(
            name=timeline.names[i],
            calls_per_step=float(calls[i] / n_steps),
            self_us=float(own_ns[i] / n_steps / 1e3),
            total_us=float(total_ns[i] / n_steps / 1e3),
            share=float(own_ns[i] / wall_ns),
            device_us=None if device_ns is None else float(device_ns[i] / n_steps / 1e3),
            tensor_core=reading(timeline.names[i]).tensor_cores if tells_units else None,
        )
        for i in np.argsort(-own_ns, kind="stable").tolist()
        if calls[i]
    )


_OWNERS = (  # by the prefix of a library's annotations
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
    """An annotation of the program; `share`: median over the steps of the time in it without an operator."""

    name: str
    share: float

    @property
    def words(self) -> str:
        """Its name in a sentence: `your annotation "forward"`."""
        owner = next((owner for prefix, owner in _OWNERS if self.name.startswith(prefix)), "your")
        return f'{owner} annotation "{self.name}"'


def unknown_by_annotation(facts: Facts) -> tuple[Annotated, ...]:
    """Where the unknown time of a step lies, the largest first.

    Empty if the causes of idle time are withheld: then all idle time is unknown anyway.
    """
    timeline, account = facts.run.timeline, facts.breakdown
    withheld = facts.integrity.withheld if facts.integrity is not None else frozenset()
    if timeline is None or account is None or not account.steps or "idle_causes" in withheld:
        return ()
    spans = labels(timeline)
    rows = np.flatnonzero(spans.of(What.ANNOTATION) & (spans.where == Where.TRAINER))
    if not len(rows):
        return ()
    bare = account.bare
    within = spans.pieces(rows)
    shares = {
        name_id: median_share(account.windows, intersect(bare, within.times(name_id)))
        for name_id in dict.fromkeys(within.name_id.tolist())
    }
    largest = sorted(shares, key=lambda name_id: -shares[name_id])
    return tuple(Annotated(timeline.names[i], shares[i]) for i in largest if shares[i] > 0)


# Ours: calling an operator costs 3 to 10 µs on a CPU, including autograd's node and the profiler: in a shorter operator
# the call is half of the time or more.
SHORT_NS = 20_000
LONGEST_GAP_NS = 100_000  # ours: Python needs 10 to 100 µs from one operator to the next; longer gaps are other work
LONGEST_LOOP_NS = 1_000_000  # ours: in longer gaps the program does not go through a training loop
_LOOP = 64  # ours, direct calls within one operator: composite operators make about ten
_OVER_LISTS = ("aten::_foreach_", "aten::stack", "aten::cat", "aten::pad_sequence")
_IN_TIME = ("aten::gru", "aten::lstm", "aten::rnn_")
_REARRANGING = ("aten::contiguous", "aten::clone")
_CONVERTING = ("aten::_to_copy", "aten::to")


class HostOperators(Struct, frozen=True):
    """Operators on the host in the profiled steps; shares are of the steps' time.

    `calling_share`: time outside operators with `SHORT_NS` or more of their own, without waiting for data, calls apart
    from the training (`calls_share`) and gaps of more than `LONGEST_GAP_NS`. `fixed_share`: the same, but including
    such calls and gaps of up to `LONGEST_LOOP_NS`, in which a training loop goes from batch to batch. Neither includes
    calls that an operator makes in a loop of its own (`_LOOP` or more, such as one per row), because the user's code
    does not make these; but loops over time, as in an LSTM, are fixed cost: more samples do not make them longer.

    `count`: operators per step, `short_count` of them short. `rearranging_share`: copies that only change a tensor's
    order in memory, `rearranging_count` of them per step; `span` of the longest.
    """

    count: float
    short_count: float
    calling_share: float
    fixed_share: float
    calls_share: float
    rearranging_share: float
    rearranging_count: float
    span: tuple[int, int] | None


def host_operators(
    timeline: Timeline, account: Breakdown, batches_share: float = 0.0, calls_share: float = 0.0
) -> HostOperators | None:
    """The operators of the accounted steps; None if no operator ran in them, or no step was found.

    `batches_share`: share of a step that makes batches and is not in the account; `calls_share`: share of all calls
    apart from the training, including those that make batches.
    """
    windows = account.step_host_windows
    if windows is None:
        return None
    spans = labels(timeline)
    tree = spans.operators
    inside = covers(windows, spans.start_ns[tree.rows])
    wall = measure(windows)
    if not inside.any() or not wall:
        return None
    own = tree.self_ns(timeline)
    long = inside & (own >= SHORT_NS)
    moved = inside & _rearranges(spans, tree)
    moved_rows, steps = tree.rows[moved], len(windows)
    longest = moved_rows[int(np.argmax(timeline.duration_ns[moved_rows]))] if len(moved_rows) else None
    waiting = sum(s.parts_ns["data_wait"] for s in account.steps)
    loops = _loops(spans, tree)

    def remaining_share(limit_ns: int, beside: float, loops: Mask) -> float:
        looped = inside & _called_in(spans, tree, loops)
        computing = float(own[long | looped].sum()) + waiting
        return max(0.0, 1 - computing / wall - max(beside, _elsewhere_ns(spans, windows, limit_ns) / wall))

    return HostOperators(
        count=float(inside.sum()) / steps,
        short_count=float((inside & ~long).sum()) / steps,
        calling_share=remaining_share(LONGEST_GAP_NS, calls_share, loops),
        fixed_share=remaining_share(
            LONGEST_LOOP_NS, batches_share, loops & ~spans.named(lambda name: name.startswith(_IN_TIME), tree.rows)
        ),
        calls_share=calls_share,
        rearranging_share=measure(spans.times(moved_rows)) / wall,
        rearranging_count=float(moved.sum()) / steps,
        span=None if longest is None else (int(timeline.start_ns[longest]), int(timeline.end_ns[longest])),
    )


def _loops(spans: Labels, tree: CallTree) -> Mask:
    """Operators that call others in a loop of their own, except loops over a list that the code made."""
    calls = np.bincount(tree.parent[tree.parent >= 0], minlength=len(tree.rows))
    may_loop = spans.named(lambda name: name.startswith("aten::") and not name.startswith(_OVER_LISTS))
    return np.asarray(may_loop[tree.rows] & (calls >= _LOOP))


def _called_in(spans: Labels, tree: CallTree, loops: Mask) -> Mask:
    """Rows within these loops, and the backward nodes of operators that mostly run in such loops."""
    looped = _below(tree, loops)
    if not looped.any():
        return looped
    kind = spans.name_id[tree.rows]
    nodes = spans.of(*NODES)[tree.rows]
    updating = covers(spans.updating, spans.start_ns[tree.rows])
    forward = ~(nodes | _below(tree, nodes) | updating)
    forward_count, looped_count = Counter[str](), Counter[str]()
    for counts, rows in ((forward_count, forward), (looped_count, forward & looped)):
        for i, count in zip(*np.unique(kind[rows], return_counts=True), strict=True):
            counts[plain_name(spans.names[i])] += int(count)
    operators = [plain_name(node[1]) if (node := OPERATOR_OF_NODE.search(name)) else "" for name in spans.names]
    mostly = np.array([2 * looped_count[name] > forward_count[name] for name in operators], bool)[kind]
    backward: Mask = mostly | _below(tree, mostly)
    return looped | backward


def _below(tree: CallTree, rows: Mask) -> Mask:
    """Which rows lie within such rows, at any depth."""
    below = np.zeros(len(tree.rows), dtype=bool)
    at = np.flatnonzero(tree.parent >= 0)
    above = tree.parent[at]
    while len(at):
        hit = rows[above]
        below[at[hit]] = True
        above = tree.parent[above]
        goes_on = (above >= 0) & ~hit
        at, above = at[goes_on], above[goes_on]
    return below


def _elsewhere_ns(spans: Labels, windows: Intervals, limit_ns: int) -> int:
    """Time in gaps longer than `limit_ns`."""
    working = spans.times(spans.training(*OPERATORS, *CALLS) | spans.of(What.LOADER))
    edges = union(windows.ravel(), windows.ravel() + 1)
    return measure(subtract(union(windows[:, 0], windows[:, 1]), closed(joined(working, edges), limit_ns)))


def _rearranges(spans: Labels, tree: CallTree) -> Mask:
    """Copies made by `contiguous` or `clone`, except conversions of types."""
    copies = spans.named("aten::copy_".__eq__, tree.rows)
    asking = spans.named(_REARRANGING.__contains__, tree.rows)
    converting = spans.named(_CONVERTING.__contains__, tree.rows)
    rearranging = np.zeros(len(tree.rows), dtype=bool)
    at, live = tree.parent.copy(), np.ones(len(tree.rows), dtype=bool)
    for _ in range(4):  # copy_ < clone < contiguous < reshape
        live &= at >= 0
        above = np.where(live, at, 0)
        live &= ~converting[above]
        rearranging |= live & asking[above]
        at = tree.parent[above]
    return copies & rearranging


DIVISIBLE_NS = 100_000  # ours: PyTorch splits an operator from 32,768 elements on, which take 10 to 50 µs
_SERIAL = (  # PyTorch computes these in one thread, or fetches memory from the system
    *("aten::sort", "aten::unique", "aten::_unique", "aten::nonzero", "aten::masked_select", "aten::cumsum"),
    *("aten::multinomial", "aten::randperm", "aten::embedding_dense", "aten::_ctc_loss", "aten::empty"),
)


def share_of(
    timeline: Timeline | None,
    account: Breakdown | None,
    *kinds: What,
    names: tuple[str, ...] = (),
    within: tuple[What, ...] = (),
) -> float:
    """Share of the steps in spans of these kinds or names, `within` spans of other kinds; 0 without profiled steps."""
    windows = None if account is None else account.step_host_windows
    if timeline is None or windows is None or not len(windows):
        return 0.0
    spans = labels(timeline)
    mine = spans.of(*kinds) if kinds else spans.named(names.__contains__)
    times = spans.times(mine & spans.on_training_threads)
    if within:
        times = intersect(times, spans.times(spans.training(*within)))
    return measure(intersect(union(windows[:, 0], windows[:, 1]), times)) / max(1, measure(windows))


def divisible_share(timeline: Timeline | None, account: Breakdown | None) -> float:
    """Share of the steps in long operators that several threads can share, by their own time."""
    windows = None if account is None else account.step_host_windows
    if timeline is None or windows is None:
        return 0.0
    spans = labels(timeline)
    tree = spans.operators
    own = tree.self_ns(spans)
    can = (own >= DIVISIBLE_NS) & ~spans.named(lambda name: name.startswith(_SERIAL), tree.rows)
    return float(own[can & covers(windows, timeline.start_ns[tree.rows])].sum()) / max(1, measure(windows))


def unused_share(timeline: Timeline | None, account: Breakdown | None, passes: Sequence[BackwardPass]) -> float:
    """Share of the steps spent on unused gradients, where autograd evaluated the nodes of such a pass in order."""
    windows = None if account is None else account.step_host_windows
    if timeline is None or windows is None or not passes:
        return 0.0
    rows = np.flatnonzero(labels(timeline).named(_is_evaluation) & covers(windows, timeline.start_ns))
    names = [timeline.names[i].rpartition(" ")[2].rpartition("::")[2] for i in timeline.name_id[rows].tolist()]
    took_ns, unused_ns, at = timeline.duration_ns[rows], 0.0, 0
    while at < len(names):
        match = next((p for p in passes if tuple(names[at : at + len(p.nodes)]) == p.nodes), None)
        if match is not None:
            unused_ns += float(took_ns[at : at + len(match.nodes)] @ np.array(match.unused))
        at += 1 if match is None else len(match.nodes)
    return unused_ns / max(1, measure(windows))


def _is_evaluation(name: str) -> bool:
    return name.startswith(EVALUATING) and not name.endswith(("AccumulateGrad", "GraphRoot"))
