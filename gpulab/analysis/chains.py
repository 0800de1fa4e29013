"""Finds consecutive small operations that could be fused: pointwise chains, attention in several steps."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gpulab.analysis.kernels import CLASSES, POINTWISE_OPERATORS, DeviceWork
from gpulab.intervals import Intervals, covers, intersect, measure, union
from gpulab.run import Int64, Timeline
from gpulab.timeline.labels import CallTree, Labels, Mask, distinct, labels

CHAIN = 2  # kernels: a chain of so many or more could be one kernel
_PRODUCTS = ("aten::bmm", "aten::baddbmm")
_BY_HAND = ("aten::exp", "ExpBackward0")  # the second marks the backward pass
_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax", "aten::_softmax_backward_data", *_BY_HAND)
# Views of memory, and operators that only call others to move data (a `to` that copies calls `copy_`).
_FREE = frozenset(
    {
        "view",
        "as_strided",
        "empty",
        "empty_like",
        "empty_strided",
        "detach",
        "resolve_conj",
        "resolve_neg",
        "_unsafe_view",
        "reshape",
        "expand",
        "expand_as",
        "t",
        "transpose",
        "permute",
        "squeeze",
        "unsqueeze",
        "select",
        "slice",
        "alias",
        "lift_fresh",
        "to",
        "_to_copy",
    }
)
_SCALAR = ("aten::copy_", "aten::fill_")  # if short, they move a single number: 0.5 * x wraps the 0.5
_SCALAR_NS = 20_000
WORTH_FUSING_NS = 50_000  # ours: ten times what calling an operator costs on a CPU
# Most operators between a product and the softmax of one attention: scale, mask, cast, dropout; the backward pass of
# a softmax written by hand needs most.
_BETWEEN = 12


class PointwiseChains(Struct, frozen=True):
    """Pointwise chains per step. Shares are of the time of all kernels except communication.

    `saved_share` would be saved if each chain became one kernel, which reads and writes memory once: it takes 1/n of
    the time of the chain's n kernels, but no less than the longest of them. `longest` is a chain's number of kernels.
    """

    chains: float
    kernels: float
    share: float
    saved_share: float
    longest: int
    span: tuple[int, int] | None  # of the chain that takes longest


def pointwise_chains(work: DeviceWork) -> PointwiseChains | None:
    """Runs of pointwise kernels with no other work between them on their stream.

    Kernels of an optimizer are left out, and those inside attention, which fused attention removes.
    """
    t = work.timeline
    order = np.lexsort((t.start_ns[work.rows], t.lane_id[work.rows]))
    chained = (work.kind == CLASSES.index("pointwise")) & ~work.of_optimizer
    ends = _around_softmax(t, work.tree, work.host_windows)
    if ends is not None:
        chained &= ~_launched_between(work, t.lane_id[ends.first], t.end_ns[ends.first], t.start_ns[ends.last])
    return _chains(t, work.rows[order], chained[order], work.computing_us * work.steps * 1e3, work.steps)


def _chains(timeline: Timeline, rows: Int64, chained: Mask, total_ns: float, steps: int) -> PointwiseChains | None:
    """Runs of chained rows among rows that are sorted by lane and time."""
    if not chained.any():
        return None
    lane = timeline.lane_id[rows]
    breaks = np.ones(len(rows), dtype=bool)
    breaks[1:] = ~chained[1:] | ~chained[:-1] | (lane[1:] != lane[:-1])
    chain = np.cumsum(breaks) - 1
    length = np.bincount(chain[chained], minlength=int(chain[-1]) + 1)
    long = length >= CHAIN
    if not long.any() or total_ns <= 0:
        return None
    time = np.bincount(chain, weights=timeline.duration_ns[rows] * chained, minlength=len(length))
    longest = np.zeros(len(length))
    np.maximum.at(longest, chain, timeline.duration_ns[rows] * chained)
    saved = time - np.maximum(time / np.maximum(length, 1), longest)
    costliest = np.flatnonzero(chain == int(np.where(long, time, -1).argmax()))
    return PointwiseChains(
        chains=float(long.sum()) / steps,
        kernels=float(length[long].sum()) / steps,
        share=float(time[long].sum()) / total_ns,
        saved_share=float(saved[long].sum()) / total_ns,
        longest=int(length.max()),
        span=(int(timeline.start_ns[rows[costliest[0]]]), int(timeline.end_ns[rows[costliest[-1]]])),
    )


class AttentionChains(Struct, frozen=True):
    """Attention that writes its whole matrix to memory: two products with a softmax between them.

    Shares are of the time of all kernels except communication: `share` is the softmax and everything between the two
    products, which a fused kernel does without memory traffic; `product_share` is the products. `by_library`: PyTorch's
    own slow path (`_scaled_dot_product_attention_math`) does this, not the user's code.
    """

    per_step: float
    share: float
    product_share: float
    by_library: bool
    span: tuple[int, int] | None


def attention_chains(work: DeviceWork) -> AttentionChains | None:
    """Found by operators: a softmax whose nearest neighbours among products and softmaxes are both products.

    The backward pass has a product before its `_softmax_backward_data` and one after it.
    """
    t = work.timeline
    ends = _around_softmax(t, work.tree, work.host_windows)
    if ends is None:
        return None
    first, last = ends.first, ends.last
    between = _launched_between(work, t.lane_id[first], t.end_ns[first], t.start_ns[last])
    products = np.isin(work.operator, np.concatenate((first, last)))
    return AttentionChains(
        per_step=len(first) / work.steps,
        share=work.share(between & ~products),
        product_share=work.share(products),
        by_library=_by_library(t),
        span=_longest(t, ends),
    )


def attention_on_cpu(timeline: Timeline, windows: Intervals) -> AttentionChains | None:
    """The same if the CPU computes: shares of the steps' wall time in which operators between the products run."""
    spans = labels(timeline)
    ends = _around_softmax(spans, spans.operators, windows)
    if ends is None:
        return None
    first, last = ends.first, ends.last
    operators = spans.times(spans.operators.rows)
    between = intersect(union(timeline.end_ns[first], timeline.start_ns[last]), operators)
    both = np.concatenate((first, last))
    products = union(timeline.start_ns[both], timeline.end_ns[both])
    wall = measure(windows) or 1
    return AttentionChains(
        per_step=len(first) / max(1, len(windows)),
        share=measure(between) / wall,
        product_share=measure(products) / wall,
        by_library=_by_library(timeline),
        span=_longest(timeline, ends),
    )


def pointwise_on_cpu(timeline: Timeline, windows: Intervals) -> PointwiseChains | None:
    """Pointwise operators of the training threads that follow one another; shares of the steps' wall time.

    Left out are operators of an optimizer, inside attention, and so short that their cost is that of the call.
    """
    spans = labels(timeline)
    tree = spans.operators
    rows = tree.rows[_working(spans, tree)]
    rows = rows[covers(windows, timeline.start_ns[rows])]
    chained = spans.named(lambda name: POINTWISE_OPERATORS.match(name) is not None, rows)
    chained &= ~covers(spans.updating, timeline.start_ns[rows])
    chained &= timeline.duration_ns[rows] >= WORTH_FUSING_NS
    ends = _around_softmax(spans, tree, windows)
    if ends is not None:
        between = union(timeline.end_ns[ends.first], timeline.start_ns[ends.last])
        chained &= ~covers(between, timeline.start_ns[rows])
    return _chains(timeline, rows, chained, measure(windows), max(1, len(windows)))


def _working(spans: Labels, tree: CallTree) -> Mask:
    """Which operators do their work themselves: the operators that they call move at most a single number."""
    # operators that only make views, record for autograd or move a single number: they do not break a chain
    free = spans.named(_is_free, tree.rows)
    scalar = spans.named(_SCALAR.__contains__, tree.rows) & (spans.duration_ns[tree.rows] < _SCALAR_NS)
    moving = ~(free | scalar)
    calls = np.zeros(len(tree.rows), dtype=bool)  # whether it calls an operator that moves data, at any depth
    at = tree.parent[moving]
    while len(at := at[at >= 0]):
        at = at[~calls[at]]
        calls[at] = True
        at = tree.parent[at]
    working: Mask = moving & ~calls
    return working


def _is_free(name: str) -> bool:
    """Whether a row costs nothing on the device: it is no operator, makes a view, or only calls others."""
    return not name.startswith("aten::") or name.removeprefix("aten::") in _FREE


def _by_library(timeline: Timeline) -> bool:
    """Whether the trace has PyTorch's slow path, even if none of it ran in the steps."""
    return any("scaled_dot_product_attention_math" in name for name in timeline.names)


def _longest(timeline: Timeline, ends: SoftmaxEnds) -> tuple[int, int]:
    """The longest that is not in a backward pass, which runs far from its source line; else the longest of all."""
    forward = ~ends.backward if not ends.backward.all() else ends.backward
    first, last = ends.first[forward], ends.last[forward]
    i = int(np.argmax(timeline.end_ns[last] - timeline.start_ns[first]))
    return int(timeline.start_ns[first[i]]), int(timeline.end_ns[last[i]])


class SoftmaxEnds(Struct, frozen=True):
    """Rows of the products before and after each softmax; `backward`: the softmax belongs to a gradient."""

    first: Int64
    last: Int64
    backward: Mask


def _around_softmax(spans: Labels, tree: CallTree, windows: Intervals) -> SoftmaxEnds | None:
    """The products around each softmax of the steps that has a product on both sides; None without any."""
    softmax = spans.named(_SOFTMAX.__contains__, tree.rows)
    position = np.flatnonzero(softmax | spans.named(_PRODUCTS.__contains__, tree.rows))  # by thread, in order of time
    if len(position) < 3:
        return None
    at, softmax = tree.rows[position], softmax[position]
    middle = np.flatnonzero(softmax[1:-1] & ~softmax[:-2] & ~softmax[2:]) + 1
    lane = spans.lane_id[at]
    middle = middle[(lane[middle - 1] == lane[middle]) & (lane[middle + 1] == lane[middle])]
    before = np.cumsum(_working(spans, tree))
    near = before[position[middle + 1]] - before[position[middle - 1]] <= 2 * _BETWEEN
    middle = middle[near & covers(windows, spans.start_ns[at[middle]])]
    backward = spans.named(lambda name: "ackward" in name, at[middle])
    return SoftmaxEnds(at[middle - 1], at[middle + 1], backward) if len(middle) else None


def _launched_between(work: DeviceWork, lane: np.ndarray, begin: Int64, end: Int64) -> Mask:
    """Which rows these threads launched within these times."""
    t, between = work.timeline, np.zeros(len(work.rows), dtype=bool)
    launched = np.flatnonzero(work.call >= 0)
    call = work.call[launched]
    for thread in distinct(lane):
        mine = lane == thread
        order = np.argsort(begin[mine], kind="stable")
        start, stop = begin[mine][order], end[mine][order]
        launch_ns = t.start_ns[call]
        i = np.searchsorted(start, launch_ns, side="right") - 1
        between[launched] |= (i >= 0) & (launch_ns < stop[np.maximum(i, 0)]) & (t.lane_id[call] == thread)
    return between
