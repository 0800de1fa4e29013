"""What operators cost where the CPU computes: those too short to compute much, those that only rearrange memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
from msgspec import Struct

from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.host.backward_lines import NODE, plain_name
from gpulab.intervals import Intervals, closed, covers, joined, measure, subtract, union
from gpulab.run import Int64, Timeline
from gpulab.timeline import spans
from gpulab.timeline.launches import CallTree

# Ours: to call an operator costs 3 to 10 µs on a CPU, autograd's node and the profiler included: half or more of a
# shorter one is its call.
SHORT_NS = 20_000
LONGEST_GAP_NS = 100_000  # ours: Python needs 10 to 100 µs from one operator to the next; more is work of its own
LONGEST_LOOP_NS = 1_000_000  # ours: in longer gaps the program does something else than going through a training loop
_LOOP = 64  # ours, direct calls of one operator: what is composed of others calls about ten
_OPERATOR = spans.starting_with("aten::")
_OVER_LISTS = spans.starting_with("aten::_foreach_", "aten::stack", "aten::cat", "aten::pad_sequence")
_IN_TIME = spans.starting_with("aten::gru", "aten::lstm", "aten::rnn_")
_REARRANGING = ("aten::contiguous", "aten::clone")
_CONVERTING = ("aten::_to_copy", "aten::to")


class HostOperators(Struct, frozen=True):
    """Of the profiled steps. `calling_share`: of their time what no operator of `SHORT_NS` or more of its own computes,
    without waiting for data, calls beside the training (`calls_share`) and gaps of more than `LONGEST_GAP_NS`;
    `fixed_share`: the same with such calls and with gaps of up to `LONGEST_LOOP_NS`, in which a training loop goes from
    batch to batch; `count` of operators per step, `short_count` of them the short ones. No share has what an operator
    calls in a loop of its own of `_LOOP` calls or more, as for each row: the code makes no such call. Where the loop is
    over time, as an LSTM's, it is fixed cost: more samples do not make it longer.

    `rearranging_share`: of their time copies that give a tensor another order in memory and nothing else,
    `rearranging_count` per step; `span` of the longest.
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
    """None where no operator ran in the accounted steps, or no step was found.

    `batches_share`: of a step, what makes batches, as far as the account does not hold it; `calls_share`: all calls
    beside the training, these too.
    """
    windows = account.step_host_windows
    if windows is None:
        return None
    mine = spans.training_operators(timeline) & ~spans.named(timeline, spans.is_loader)
    tree = CallTree.of(timeline, np.flatnonzero(mine))
    inside = covers(windows, timeline.start_ns[tree.rows])
    wall = measure(windows)
    if not inside.any() or not wall:
        return None
    own = tree.self_ns(timeline)
    long = inside & (own >= SHORT_NS)
    moved = inside & _rearranges(timeline, tree)
    moved_rows, steps = tree.rows[moved], len(windows)
    longest = moved_rows[int(np.argmax(timeline.duration_ns[moved_rows]))] if len(moved_rows) else None
    waiting = sum(s.parts_ns["data_wait"] for s in account.steps)
    loops = _loops(timeline, tree)

    def remaining_share(limit_ns: int, beside: float, loops: spans.Mask) -> float:
        looped = inside & _called_in(timeline, tree, loops)
        computing = float(own[long | looped].sum()) + waiting
        return max(0.0, 1 - computing / wall - max(beside, _elsewhere_ns(timeline, windows, limit_ns) / wall))

    return HostOperators(
        count=float(inside.sum()) / steps,
        short_count=float((inside & ~long).sum()) / steps,
        calling_share=remaining_share(LONGEST_GAP_NS, calls_share, loops),
        fixed_share=remaining_share(
            LONGEST_LOOP_NS, batches_share, loops & ~spans.named(timeline, _IN_TIME)[tree.rows]
        ),
        calls_share=calls_share,
        rearranging_share=_share(timeline, moved_rows, wall),
        rearranging_count=float(moved.sum()) / steps,
        span=None if longest is None else (int(timeline.start_ns[longest]), int(timeline.end_ns[longest])),
    )


def _loops(timeline: Timeline, tree: CallTree) -> spans.Mask:
    """Operators that call others in a loop of their own, but not over a list that the code made."""
    calls = np.bincount(tree.parent[tree.parent >= 0], minlength=len(tree.rows))
    may_loop = spans.named(timeline, _OPERATOR) & ~spans.named(timeline, _OVER_LISTS)
    return np.asarray(may_loop[tree.rows] & (calls >= _LOOP))


def _called_in(timeline: Timeline, tree: CallTree, loops: spans.Mask) -> spans.Mask:
    """What runs within these loops, and the backward nodes of operators that mostly do."""
    looped = _below(tree, loops)
    if not looped.any():
        return looped
    kind = timeline.name_id[tree.rows]
    nodes = spans.named(timeline, spans.is_autograd_node)[tree.rows]
    updating = covers(spans.update_times(timeline), timeline.start_ns[tree.rows])
    forward = ~(nodes | _below(tree, nodes) | updating)
    forward_count, looped_count = Counter[str](), Counter[str]()
    for counts, rows in ((forward_count, forward), (looped_count, forward & looped)):
        for i, count in zip(*np.unique(kind[rows], return_counts=True), strict=True):
            counts[plain_name(timeline.names[i])] += int(count)
    operators = [plain_name(node[1]) if (node := NODE.search(name)) else "" for name in timeline.names]
    mostly = np.array([2 * looped_count[name] > forward_count[name] for name in operators], bool)[kind]
    backward: spans.Mask = mostly | _below(tree, mostly)
    return looped | backward


def _below(tree: CallTree, rows: spans.Mask) -> spans.Mask:
    """What lies within such rows, however deep."""
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


def _share(timeline: Timeline, rows: Int64, wall_ns: int) -> float:
    mask = np.zeros(len(timeline), dtype=bool)
    mask[rows] = True
    covered: Intervals = spans.covered(timeline, mask)
    return measure(covered) / wall_ns


def _elsewhere_ns(timeline: Timeline, windows: Intervals, limit_ns: int) -> int:
    """Time in gaps longer than that."""
    host = spans.in_category(timeline, *spans.HOST_CATEGORIES) & spans.on_training_threads(timeline)
    working = host | spans.named(timeline, spans.is_loader)
    edges = union(windows.ravel(), windows.ravel() + 1)
    return measure(
        subtract(union(windows[:, 0], windows[:, 1]), closed(joined(spans.covered(timeline, working), edges), limit_ns))
    )


def _rearranges(timeline: Timeline, tree: CallTree) -> spans.Mask:
    """Copies that `contiguous` or `clone` asked for, and no conversion of types."""
    copies = spans.named(timeline, spans.among("aten::copy_"))[tree.rows]
    asking = spans.named(timeline, spans.among(*_REARRANGING))[tree.rows]
    converting = spans.named(timeline, spans.among(*_CONVERTING))[tree.rows]
    asked = np.zeros(len(tree.rows), dtype=bool)
    at, live = tree.parent.copy(), np.ones(len(tree.rows), dtype=bool)
    for _ in range(4):  # copy_ < clone < contiguous < reshape
        live &= at >= 0
        above = np.where(live, at, 0)
        live &= ~converting[above]
        asked |= live & asking[above]
        at = tree.parent[above]
    return copies & asked
