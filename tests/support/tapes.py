"""A tape beside what decides while a loop runs: its marks told to the step tracker, its steps compared with a run's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec.structs import asdict

from gpulab.capture.dataloader.wait_hooks import Answer
from gpulab.capture.steps.step_boundaries import StepTracker
from gpulab.capture.tape.marks import Kind, Marks
from gpulab.capture.tape.step_finder import steps_of
from gpulab.run import Int64, Phase, StepFlag, Steps

ANSWERS: dict[int, Answer] = {Kind.GOT: "batch", Kind.END: "end", Kind.ITERATOR: "iterator"}


class Retold:
    """Calls a tracker as the hooks and the loop do."""

    def __init__(self, origin_ns: int = 0) -> None:
        self.tracker = StepTracker(origin_ns)
        self._began: dict[int, int] = {}
        self._attempts: list[tuple[int, int]] = []  # of GradScaler: since when, steps of optimizers so far
        self._steps = 0
        self._backward_ns = 0
        self._stopped = False
        self._passing = False  # a backward pass is going on

    def hear(self, t_ns: int, kind: int, argument: int) -> None:
        """One mark."""
        if self._stopped:
            return
        tracker = self.tracker
        self._passing = kind == Kind.BACKWARD or (self._passing and kind != Kind.BACKWARD_END)
        simple: dict[int, Callable[[], object]] = {
            Kind.BEGIN: lambda: tracker.begin(t_ns),
            Kind.ITER: lambda: tracker.loader_asked(argument, t_ns, fresh=True),
            Kind.ASK: lambda: tracker.loader_asked(argument, t_ns),
            Kind.UPDATED: tracker.by_hand,
            Kind.HAND: lambda: tracker.manual(t_ns),
            Kind.RESUME: lambda: tracker.resume(t_ns, profiler_edge=bool(argument)),
            Kind.COMPILE: lambda: tracker.flag(StepFlag.COMPILE),
        }
        if kind in simple:
            simple[kind]()
        elif kind in ANSWERS:
            known = kind == Kind.GOT and argument >= 0
            tracker.loader_answered(t_ns, ANSWERS[kind], argument if known else None)
        elif kind in (Kind.BACKWARD, Kind.GRAD):
            if argument:
                tracker.updated(t_ns)
            if kind == Kind.BACKWARD:
                tracker.backward(t_ns)
        elif kind == Kind.BACKWARD_END:
            self._backward_ns = t_ns
            tracker.backward_ended(t_ns)
        elif kind == Kind.PHASE:
            tracker.phase = Phase(argument)
        elif kind == Kind.STOP:
            self._stopped = True
            if self._passing:  # the loop ends before it
                tracker._open.backwards -= 1
        else:
            self._optimizer(t_ns, kind, argument)

    def _optimizer(self, t_ns: int, kind: int, optimizer: int) -> None:
        if kind == Kind.STEP:
            self._began[optimizer] = t_ns
        elif kind == Kind.STEPPED:
            self._steps += 1
            self._optimized(optimizer, self._began.pop(optimizer, t_ns), t_ns)
        elif kind == Kind.SCALE:
            self._attempts.append((t_ns, self._steps))
        else:
            since_ns, steps = self._attempts.pop()
            if kind == Kind.SCALED and steps == self._steps:
                self._optimized(optimizer, since_ns, t_ns)

    def _optimized(self, optimizer: int, since_ns: int, t_ns: int) -> None:
        self.tracker.optimized(optimizer, max(since_ns, self._backward_ns), t_ns)


def retold(marks: Marks, origin_ns: int, end_ns: int) -> Steps:
    """The steps that the tracker finds in a tape."""
    told = Retold(origin_ns)
    for mark in marks.tolist():
        told.hear(*mark)
    return told.tracker.finish(end_ns)


def assert_equal(found: Steps, oracle: Steps) -> None:
    """But for gpulab's own time, which a tape does not hold."""
    theirs = asdict(oracle)
    for name, column in asdict(found).items():
        if name != "own_ns":
            assert column.tolist() == theirs[name].tolist(), name


def assert_same_steps(marks: Marks, steps: Steps, origin_ns: int, end_ns: int) -> None:
    """The steps of the tape are those that were found beside it: they begin and end at the same marks."""
    found = steps_of(marks, origin_ns, end_ns)
    assert_equal(found, retold(marks, origin_ns, end_ns))
    for name in ("number", "batch_count", "sample_count", "phase", "flags"):
        assert getattr(found, name).tolist() == getattr(steps, name).tolist(), name
    t_ns = np.append(marks["t_ns"], end_ns) - origin_ns
    assert _places(t_ns, found.start_ns) == _places(t_ns, steps.start_ns), "starts"
    ends, others = _places(t_ns, found.end_ns), _places(t_ns, steps.end_ns)
    if len(steps) and steps.flags[-1] & StepFlag.PARTIAL and others[-1] == ends[-1] - 1:
        others[-1] += 1  # where a backward pass ends, the loop has it before the tape
    assert ends == others, "ends"


def _places(t_ns: Int64, moments: Int64) -> list[int]:
    """Of each moment the last mark before it, or at it."""
    return list(np.searchsorted(t_ns, moments, side="right"))
