"""When a loop without a DataLoader makes its next batch itself: looks at the stack tell, at lines that were followed.

Looks are right on average: each stands for the time since the one before it. Of few of them nothing is said.
"""

from __future__ import annotations

from gpulab.intervals import union
from gpulab.run import Run

LEAST_LOOKS = 8  # ours: of fewer in the profiled time, chance speaks
LEAST_PREPARING = 3
LEAST_BESIDE = 40  # ours, beside the profiled time: a share of fewer is right to a sixth at best, in 19 of 20 cases


def prepared(run: Run) -> tuple[tuple[int, int], ...]:
    """The times, as [start, end); empty where a DataLoader feeds the steps, and without looks enough."""
    stack = run.stack
    if stack is None or run.steps.batch_count.any() or len(stack.prepares_batch) != len(stack.t_ns):
        return ()
    rows = stack.prepares_batch == 1
    if len(stack.t_ns) < LEAST_LOOKS or rows.sum() < LEAST_PREPARING:
        return ()
    times = union(stack.since_ns[rows], stack.t_ns[rows])
    return tuple((start, end) for start, end in times.tolist())


def share_beside(run: Run) -> float | None:
    """Of the time beside the profiler, what goes to making batches; None where too few looks tell."""
    own = run.own_batches
    if own is None or own.looks < LEAST_BESIDE or own.looked_ns <= 0:
        return None
    return own.preparing_ns / own.looked_ns
