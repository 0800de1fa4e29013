"""Marks at times of a script, told to the step finder as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec.structs import asdict

from gpulab.run import Steps
from gpulab.tape.marks import MARK, Kind, Marks
from gpulab.tape.step_finder import StepFinder

Answer = Literal["batch", "iterator", "end"]
ANSWERS: dict[Answer, Kind] = {"batch": Kind.GOT, "iterator": Kind.ITERATOR, "end": Kind.END}


def tape_of(rows: Sequence[tuple[int, int, int]]) -> Marks:
    """Times, kinds and arguments."""
    return np.array(list(rows), MARK)


def steps_by_hand(count: int, step_ns: int, *, start_ns: int = 0, wait_ns: int = 0, samples: int = 32) -> Marks:
    """Steps that follow one another, each with a batch."""
    rows: list[tuple[int, int, int]] = []
    for t_ns in range(start_ns, start_ns + count * step_ns, step_ns):
        rows += (t_ns, Kind.ASK, 1), (t_ns + wait_ns, Kind.GOT, samples), (t_ns + step_ns, Kind.HAND, 0)
    return tape_of(rows)


class Told(StepFinder):
    """Writes the marks of what happens, and reads each at once."""

    def __init__(self, origin_ns: int = 0, mark_ns: int = 0) -> None:
        super().__init__(origin_ns, mark_ns)
        self.rows: list[tuple[int, int, int]] = []

    def mark(self, t_ns: int, kind: int, argument: int = 0) -> bool:
        """Whether a step has ended there."""
        count = len(self)
        self.rows.append((t_ns, kind, argument))
        self.read(tape_of(self.rows[-1:]))
        return len(self) > count

    def asked(self, loader: int, t_ns: int, *, fresh: bool = False) -> bool:
        """A loader is asked for a batch, or for an iterator."""
        return self.mark(t_ns, Kind.ITER if fresh else Kind.ASK, loader)

    def answered(self, t_ns: int, answer: Answer, samples: int | None = None) -> None:
        """It has answered."""
        self.mark(t_ns, ANSWERS[answer], -1 if samples is None else samples)

    def backward(self, t_ns: int, end_ns: int | None = None, *, updated: bool = False) -> bool:
        """A backward pass, the first after weights were updated or not."""
        closed = self.mark(t_ns, Kind.BACKWARD, updated)
        self.mark(t_ns if end_ns is None else end_ns, Kind.BACKWARD_END)
        return closed

    def optimized(self, optimizer: int, start_ns: int, end_ns: int) -> bool:
        """An optimizer has stepped."""
        self.mark(start_ns, Kind.STEP, optimizer)
        return self.mark(end_ns, Kind.STEPPED, optimizer)


def assert_equal(found: Steps, others: Steps) -> None:
    """All columns."""
    theirs = asdict(others)
    for name, column in asdict(found).items():
        assert column.tolist() == theirs[name].tolist(), name
