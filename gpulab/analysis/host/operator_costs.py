"""What operators cost where the CPU computes: those too short to compute much, those that only rearrange memory."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gpulab.analysis.breakdown import Breakdown
from gpulab.intervals import Intervals, closed, covers, joined, measure, subtract, union
from gpulab.run import Int64, Timeline
from gpulab.timeline import spans
from gpulab.timeline.launches import CallTree

# Ours: to call an operator costs 3 to 10 µs on a CPU, autograd's node and the profiler included: half or more of a
# shorter one is its call.
SHORT_NS = 20_000
LONGEST_GAP_NS = 1_000_000  # ours: Python needs 10 to 100 µs from one operator to the next; more is work of its own
_REARRANGING = ("aten::contiguous", "aten::clone")
_CONVERTING = ("aten::_to_copy", "aten::to")


class HostOperators(Struct, frozen=True):
    """Of the profiled steps. `calling_share`: of their time what no operator of `SHORT_NS` or more of its own computes,
    without waiting for data and gaps of more than `LONGEST_GAP_NS`, in which the program does something else; `count`
    of operators per step, `short_count` of them the short ones.

    `rearranging_share`: of their time copies that give a tensor another order in memory and nothing else,
    `rearranging_count` per step; `span` of the longest.
    """

    count: float
    short_count: float
    calling_share: float
    rearranging_share: float
    rearranging_count: float
    span: tuple[int, int] | None


def host_operators(timeline: Timeline, account: Breakdown, preparing: float = 0.0) -> HostOperators | None:
    """None where no operator ran in the accounted steps, or no step was found.

    `preparing`: share of a step in which the loop makes its next batch, as far as the account does not hold it.
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
    waiting = sum(s.parts_ns["data_wait"] for s in account.steps) + _elsewhere_ns(timeline, windows)
    return HostOperators(
        count=float(inside.sum()) / steps,
        short_count=float((inside & ~long).sum()) / steps,
        calling_share=max(0.0, 1 - preparing - (float(own[long].sum()) + waiting) / wall),
        rearranging_share=_share(timeline, moved_rows, wall),
        rearranging_count=float(moved.sum()) / steps,
        span=None if longest is None else (int(timeline.start_ns[longest]), int(timeline.end_ns[longest])),
    )


def _share(timeline: Timeline, rows: Int64, wall_ns: int) -> float:
    mask = np.zeros(len(timeline), dtype=bool)
    mask[rows] = True
    covered: Intervals = spans.covered(timeline, mask)
    return measure(covered) / wall_ns


def _elsewhere_ns(timeline: Timeline, windows: Intervals) -> int:
    """Time in gaps too long to be the way from one operator to the next."""
    host = spans.in_category(timeline, *spans.HOST_CATEGORIES) & spans.on_training_threads(timeline)
    working = host | spans.named(timeline, spans.is_loader)
    edges = union(windows.ravel(), windows.ravel() + 1)
    return measure(
        subtract(
            union(windows[:, 0], windows[:, 1]), closed(joined(spans.covered(timeline, working), edges), LONGEST_GAP_NS)
        )
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
