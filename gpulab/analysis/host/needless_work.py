"""Shares of the profiled steps on the host's threads that go to work which need not be done, or not by one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gpulab.analysis.breakdown import Breakdown
from gpulab.intervals import covers, intersect, measure, union
from gpulab.run import BackwardPass, Timeline
from gpulab.timeline import spans
from gpulab.timeline.launches import CallTree

EVALUATING = "autograd::engine::evaluate_function: "
DIVISIBLE_NS = 100_000  # ours: PyTorch splits an operator from 32,768 elements on, which take 10 to 50 µs
_SERIAL = spans.starting_with(  # PyTorch computes these in one thread, or fetches memory from the system
    *("aten::sort", "aten::unique", "aten::_unique", "aten::nonzero", "aten::masked_select", "aten::cumsum"),
    *("aten::multinomial", "aten::randperm", "aten::embedding_dense", "aten::_ctc_loss", "aten::empty"),
)


def share_of(
    timeline: Timeline | None,
    account: Breakdown | None,
    test: Callable[[str], bool],
    within: Callable[[str], bool] | None = None,
) -> float:
    """Of spans whose name passes the test, within such others; 0 where no step was profiled."""
    windows = None if account is None else account.step_host_windows
    if timeline is None or windows is None or not len(windows):
        return 0.0
    mine = spans.on_training_threads(timeline)
    times = spans.covered(timeline, mine & spans.named(timeline, test))
    if within is not None:
        times = intersect(times, spans.covered(timeline, mine & spans.named(timeline, within)))
    return measure(intersect(union(windows[:, 0], windows[:, 1]), times)) / max(1, measure(windows))


def divisible_share(timeline: Timeline | None, account: Breakdown | None) -> float:
    """Of operators that several threads can share: long ones, of their own time."""
    windows = None if account is None else account.step_host_windows
    if timeline is None or windows is None:
        return 0.0
    mine = spans.training_operators(timeline) & ~spans.named(timeline, spans.is_loader)
    tree = CallTree.of(timeline, np.flatnonzero(mine))
    own = tree.self_ns(timeline)
    can = (own >= DIVISIBLE_NS) & ~spans.named(timeline, _SERIAL)[tree.rows]
    return float(own[can & covers(windows, timeline.start_ns[tree.rows])].sum()) / max(1, measure(windows))


def unused_share(timeline: Timeline | None, account: Breakdown | None, passes: Sequence[BackwardPass]) -> float:
    """Of gradients that nobody uses: where autograd evaluated each node of such a pass, in its order."""
    windows = None if account is None else account.step_host_windows
    if timeline is None or windows is None or not passes:
        return 0.0
    rows = np.flatnonzero(spans.named(timeline, _is_evaluation) & covers(windows, timeline.start_ns))
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
