"""Looks at a loop without a DataLoader after its profiled steps: for how much of the time does it make batches?

A few profiled steps hold too few looks for a share, and the profiler slows what it watches. A look every ten
milliseconds costs the loop less than a hundredth of its time.
"""

from __future__ import annotations

from gpulab.capture.pauses.batch_lines import BatchLines
from gpulab.capture.pauses.stack_sampler import LineSampler, Seen
from gpulab.run import OwnBatches

PERIOD_S = 0.01
MOST = 500


class BatchTimes:
    """Begun at a step's end on the training thread, once; a thread of ours looks until `end` or for 500 looks."""

    def __init__(self, lines: BatchLines) -> None:
        self._lines = lines
        self._sampler: LineSampler | None = None

    def begin(self, *, fed: bool) -> None:
        """Look from here on, unless a loader feeds the steps (`fed`) or no line is known that makes a batch."""
        if self._sampler is None and not fed and self._lines.are_known:
            self._sampler = LineSampler(batches=self._lines, period_s=PERIOD_S, most=MOST)
            self._sampler.start()

    def end(self) -> OwnBatches | None:
        """Look no more; what was seen, None where nothing was."""
        if self._sampler is None:
            return None
        self._sampler.stop()
        return summed(self._sampler.seen)


def summed(seen: Seen) -> OwnBatches | None:
    """The looks that stand for the time since another one: the first stands for the thread's own start, too."""
    count = min(len(seen.t_ns), len(seen.preparing))
    if count < 2:
        return None
    took_ns = [seen.t_ns[i] - seen.t_ns[i - 1] for i in range(1, count)]
    preparing = seen.preparing[1:count]
    own_ns = [took for took, makes in zip(took_ns, preparing, strict=True) if makes]
    return OwnBatches(len(took_ns), sum(took_ns), len(own_ns), sum(own_ns))
