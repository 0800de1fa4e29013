"""What a loop does after it has updated the parameters: neither training nor fetching data."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.host.optimizer_work import OptimizerWork
from gpulab.intervals import EMPTY, Intervals, covers, intersect, joined, paint, subtract, union, union_of
from gpulab.run import Run, StackSamples, Timeline
from gpulab.timeline import spans


class Afterwards(Struct, frozen=True):
    """`times` within the profiled `windows`, both [n, 2] in ns; `looked`: told by looks, which are right on average."""

    windows: Intervals
    times: Intervals
    looked: bool = False

    def share(self, within: Intervals | None = None) -> float:
        """Of a step: the median over the steps, of looks the mean. `within`: only what of it lies there."""
        if not len(self.windows):
            return 0.0
        times = self.times if within is None else intersect(self.times, within)
        wall = np.maximum(1, self.windows[:, 1] - self.windows[:, 0])
        taken = paint(self.windows, [times])[:, 0]
        return float(taken.sum() / wall.sum()) if self.looked else float(np.median(taken / wall))


def after_update(run: Run, account: Breakdown, optimizer: OptimizerWork) -> Afterwards:
    """From the end of each step's last update to its own end; without a DataLoader, whose fetch would end it, what lies
    at lines below that of the update.

    Without fetching batches, updating, zeroing gradients and pauses that are known by name. None of it where a backward
    pass follows the update: then that is training, too.
    """
    windows, timeline = account.step_host_windows, run.timeline
    if timeline is None or windows is None or not len(optimizer.step_times):
        return Afterwards(EMPTY, EMPTY)
    fed = bool(run.steps.batch_count.any())
    stack = None if fed else run.stack
    rest = _tails(windows, optimizer) if stack is None else _below(stack, windows)
    nodes = timeline.start_ns[spans.autograd_nodes(timeline)]
    if stack is None and covers(rest, nodes).any():
        return Afterwards(windows, EMPTY)
    loading = spans.covered(timeline, spans.named(timeline, spans.is_loader))
    named = union_of((p.start_ns, p.end_ns) for p in run.pauses)
    own = union_of(account.prepared_ns)
    other = joined(loading, own, optimizer.step_times, optimizer.zero_times, named, _annotated(timeline, rest))
    return Afterwards(windows, subtract(rest, other), looked=stack is not None)


def _annotated(timeline: Timeline, rest: Intervals) -> Intervals:
    """Annotations of the program that begin there: they say what it is, and nothing says that it is not training."""
    mine = spans.structure(timeline) & spans.on_training_thread(timeline)
    return spans.covered(timeline, mine & covers(rest, timeline.start_ns))


def _tails(windows: Intervals, optimizer: OptimizerWork) -> Intervals:
    ends = optimizer.step_times[:, 1]
    last = np.searchsorted(ends, windows[:, 1], side="right") - 1
    begin = ends[np.maximum(last, 0)]
    ending = (last >= 0) & (begin > windows[:, 0])
    return union(begin[ending], windows[ending, 1])


def _below(stack: StackSamples, windows: Intervals) -> Intervals:
    """Each look stands for the time since the one before."""
    if len(stack.after_update) != len(stack.t_ns):
        return EMPTY
    rows = stack.after_update == 1
    return intersect(union(stack.since_ns[rows], stack.t_ns[rows]), union(windows[:, 0], windows[:, 1]))
