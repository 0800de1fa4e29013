"""What a loop does after it has updated the parameters: neither training nor fetching data."""

from __future__ import annotations

import numpy as np

from gpulab.analysis import spans
from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.optimizer_work import OptimizerWork
from gpulab.intervals import EMPTY, Intervals, covers, joined, subtract, union_of
from gpulab.run import Run


def after_update(run: Run, account: Breakdown, optimizer: OptimizerWork) -> Intervals:
    """Within the profiled steps, from the end of each one's last update to its own: [n, 2] in ns.

    Without fetching batches, zeroing gradients and pauses that are known by name. None of it where a backward pass
    follows the update: then that is training, too.
    """
    timeline = run.timeline
    if timeline is None or account.whole_window or not len(optimizer.step_times):
        return EMPTY
    ends = optimizer.step_times[:, 1]
    tails = []
    for step in account.steps:
        last = int(np.searchsorted(ends, step.end_ns, side="right")) - 1
        if last >= 0 and ends[last] > step.start_ns:
            tails.append((int(ends[last]), step.end_ns))
    rest = union_of(tails)
    nodes = timeline.start_ns[spans.named(timeline, spans.is_autograd_node) & spans.on_training_threads(timeline)]
    if covers(rest, nodes).any():
        return EMPTY
    loading = spans.covered(timeline, spans.named(timeline, spans.is_loader))
    named = union_of((p.start_ns, p.end_ns) for p in run.pauses)
    return subtract(rest, joined(loading, optimizer.zero_times, named))


__all__ = ["after_update"]
