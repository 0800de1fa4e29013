"""What is kept of steps: the sums of the one that is going on, and a row for each that was closed."""

from __future__ import annotations

from array import array

import numpy as np
from msgspec import Struct

from gpulab.run import Int64, StepFlag, Steps

EPOCH_START, PROFILER_EDGE = int(StepFlag.EPOCH_START), int(StepFlag.PROFILER_EDGE)  # plain numbers are faster


class OtherStep(Struct, frozen=True):
    """A step of another optimizer than the one that ends steps; sums are those of the open step at that time."""

    optimizer: int
    end_ns: int
    data_wait_ns: int
    optimizer_ns: int
    batches: int
    samples: int


class OpenStep(Struct):
    """The step that is going on. Made anew for each step, so what is seldom filled starts as an empty tuple."""

    start_ns: int
    flags: int = 0
    data_wait_ns: int = 0
    own_ns: int = 0  # gpulab's own
    optimizer_ns: int = 0
    batches: int = 0
    samples: int = 0
    samples_known: bool = True
    asked: bool = False  # a loader was asked for anything
    fed: tuple[int, ...] = ()  # loaders that gave a batch, in order, each once
    guests: tuple[int, ...] = ()  # loaders begun amid an accumulation: evaluation
    ended: int | None = None  # the loader that had none left, if that was the last answer
    ended_first: bool = False  # it had none left already when the optimizer stepped
    backwards: int = 0
    optimized_ns: int | None = None  # end of the last optimizer step within
    batches_when_optimized: int = -1
    others: tuple[OtherStep, ...] = ()


class Rows:
    """Closed steps as columns that grow: 9 numbers a step, whatever the run's length.

    A row counts from when it has its start, the last of its numbers: an interrupt may come between any two.
    """

    def __init__(self) -> None:
        self.start_ns = array("q")
        self.end_ns = array("q")
        self.data_wait_ns = array("q")
        self.optimizer_ns = array("q")
        self.own_ns = array("q")
        self.batches = array("q")
        self.samples = array("q")  # -1: unknown
        self.phase = array("q")
        self.flags = array("q")

    def __len__(self) -> int:
        return len(self.start_ns)

    def append(self, step: OpenStep, end_ns: int, phase: int) -> None:
        if len(self.end_ns) != len(self):
            self._drop_unfinished()
        self.end_ns.append(end_ns)
        self.data_wait_ns.append(step.data_wait_ns)
        self.optimizer_ns.append(step.optimizer_ns)
        self.own_ns.append(step.own_ns)
        self.batches.append(step.batches)
        self.samples.append(step.samples if step.samples_known and step.batches else -1)
        self.phase.append(phase)
        self.flags.append(step.flags)
        self.start_ns.append(step.start_ns)

    def _drop_unfinished(self) -> None:
        for column in vars(self).values():
            del column[len(self) :]

    def clear(self) -> None:
        for column in vars(self).values():
            del column[:]

    def since_epoch(self) -> int:
        """Rows since the newest epoch began: all of them where none did."""
        newest = next((i for i in reversed(range(len(self))) if self.flags[i] & EPOCH_START), 0)
        return len(self) - newest

    def lead_into(self, step: OpenStep, count: int) -> None:
        """Add the newest `count` rows to the open step: they were its beginning."""
        if not count:
            return
        step.start_ns = self.start_ns[-count]
        step.data_wait_ns += sum(self.data_wait_ns[-count:])
        step.optimizer_ns += sum(self.optimizer_ns[-count:])
        step.own_ns += sum(self.own_ns[-count:])
        step.batches += sum(self.batches[-count:])
        step.samples += sum(max(0, s) for s in self.samples[-count:])
        step.samples_known &= all(s >= 0 for s in self.samples[-count:])
        step.flags |= self.flags[-count] & EPOCH_START

    def give_batch(self, row: int, step: OpenStep) -> None:
        """One batch of a closed step belongs to the open one."""
        each = self.samples[row] // self.batches[row]
        self.batches[row] -= 1
        step.batches += 1
        if self.samples[row] >= 0:
            self.samples[row] -= each
            step.samples += each
        else:
            step.samples_known = False

    def steps(self, origin_ns: int) -> Steps:
        """All rows, on a clock that starts at `origin_ns`."""
        self._drop_unfinished()
        n = len(self)
        if n:
            self.flags[0] |= int(StepFlag.FIRST)
            self.flags[-1] |= int(StepFlag.LAST)
        start, end = _column(self.start_ns) - origin_ns, _column(self.end_ns) - origin_ns
        wall = end - start
        wait = np.minimum(_column(self.data_wait_ns), wall)
        return Steps(
            number=np.arange(1, n + 1, dtype=np.int64),
            start_ns=start,
            end_ns=end,
            data_wait_ns=wait,
            optimizer_ns=np.minimum(_column(self.optimizer_ns), wall),
            batch_count=_column(self.batches),
            sample_count=_column(self.samples),
            phase=_column(self.phase).astype(np.uint8),
            flags=_column(self.flags).astype(np.uint8),
            own_ns=np.minimum(_column(self.own_ns), wall - wait),
        )


def _column(values: array[int]) -> Int64:
    return np.array(values, dtype=np.int64)
