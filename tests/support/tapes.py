"""A tape, told mark by mark to the step tracker that decides while a loop runs: the oracle of what reads tapes."""

from __future__ import annotations

from collections.abc import Callable

from gpulab.capture.dataloader.wait_hooks import Answer
from gpulab.capture.steps.step_boundaries import StepTracker
from gpulab.capture.tape.marks import Kind, Marks
from gpulab.run import Phase, StepFlag, Steps

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

    def hear(self, t_ns: int, kind: int, argument: int) -> None:
        """One mark."""
        if self._stopped:
            return
        tracker = self.tracker
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
