"""When the optimizer works: the update of the parameters without the passes that a closure runs inside it."""

from __future__ import annotations

import numpy as np

from gpulab.intervals import Intervals, joined
from gpulab.run import Category, Timeline
from gpulab.timeline import spans


def update_times(timeline: Timeline) -> Intervals:
    """Updating the parameters and zeroing their gradients, [n, 2] in ns."""
    return joined(step_times(timeline), zero_times(timeline))


def step_times(timeline: Timeline) -> Intervals:
    """Inside `Optimizer.step`, from the end of the last backward pass in it on."""
    return _after_closure(timeline, _marked(timeline, "Optimizer.step#"))


def zero_times(timeline: Timeline) -> Intervals:
    """Inside `Optimizer.zero_grad`."""
    return _marked(timeline, "Optimizer.zero_grad#")


def _marked(timeline: Timeline, prefix: str) -> Intervals:
    marks = spans.in_category(timeline, Category.USER_ANNOTATION, Category.CPU_OP) & spans.on_training_threads(timeline)
    return spans.covered(timeline, marks & spans.named(timeline, spans.starting_with(prefix)))


def _after_closure(timeline: Timeline, stepping: Intervals) -> Intervals:
    """Without the forward and backward passes that run inside: Lightning and LBFGS hand them in as a closure."""
    nodes = spans.autograd_nodes(timeline) & (timeline.duration_ns > 0)
    start, end = timeline.start_ns[nodes], timeline.end_ns[nodes]
    if not len(stepping) or not len(start):
        return stepping
    order = np.argsort(start, kind="stable")
    latest = np.maximum.accumulate(end[order])
    last = np.searchsorted(start[order], stepping[:, 1], side="left") - 1
    begun = np.where(last >= 0, np.minimum(latest[np.maximum(last, 0)], stepping[:, 1]), stepping[:, 0])
    return np.stack((np.maximum(stepping[:, 0], begun), stepping[:, 1]), axis=1)
