"""Finds pauses of the training: saving, evaluation, garbage collection, compiling.

This runs in every step, so it must be cheap: pauses of less than a millisecond are only counted. `torch_hooks.py`
times saving, garbage collection and compiling; evaluation is found in the marks.
"""

from __future__ import annotations

import os
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from threading import get_ident
from time import perf_counter_ns
from types import FrameType

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from gpulab.capture.places import Naming, users_spot
from gpulab.capture.stack_reader import Spot, Stack
from gpulab.intervals import Intervals
from gpulab.run import Pause, PauseKind, PauseSum
from gpulab.tape.marks import Kind, Marks

# few, and each is intended
_ALWAYS_RECORDED: tuple[PauseKind, ...] = ("checkpoint_save", "evaluation", "compile")

_MOST_OFF = 200_000  # times of switches: enough to show what a run does without gradients
_FEW_MARKS = 32  # at most so many marks are read one by one
_TURNS = (Kind.ITER, Kind.ITERATOR, Kind.END, Kind.GRAD_OFF, Kind.GRAD_ON, Kind.EVAL, Kind.TRAIN, Kind.STOP)


class Stretch(Struct, frozen=True):
    """A part of the training thread's time, on the clock of the marks; `spot` is the user's line that caused it."""

    start_ns: int
    end_ns: int
    spot: Spot | None = None
    detail: str = "without gradients"
    kind: PauseKind = "evaluation"


class Pauses:
    """Collects the pauses of one run, on the thread that created it."""

    def __init__(self) -> None:
        self._thread = get_ident()
        self._process = os.getpid()
        self.stretches: list[Stretch] = []
        self._more: dict[PauseKind, tuple[int, int]] = {}
        self.spots: dict[int, Spot | None] = {}  # by a mark's time: the user's line that made it
        self.begin_anew()
        self._begins_ns = 0
        # when training began, and the short pauses until then
        self._first_trained: tuple[int, dict[PauseKind, tuple[int, int]]] | None = None
        self.over = False

    def begin_anew(self) -> None:
        """Read again from the first mark on."""
        self._passes, self._grad_off, self._eval_mode = Passes(), GradOff(), EvalMode()
        self._evaluated: list[Stretch] = []
        self._stopped = False

    def is_active(self) -> bool:
        """Whether calls on this thread count: not on another thread, and not after the run."""
        return get_ident() == self._thread and not self.over

    def add(
        self,
        kind: PauseKind,
        start_ns: int,
        end_ns: int,
        frame: FrameType | None,
        detail: str = "",
    ) -> None:
        """Add a pause; `frame` is its caller."""
        if os.getpid() != self._process or self.over or start_ns < self._begins_ns:
            return
        if end_ns - start_ns >= SHORTEST_NS or kind in _ALWAYS_RECORDED:
            self._add_stretch(Stretch(start_ns, end_ns, users_spot(frame), detail, kind))
        else:
            self._count(kind, end_ns - start_ns)

    def begin(self, now_ns: int) -> None:
        """The user's code begins: earlier pauses were in gpulab's own start."""
        self._begins_ns = now_ns
        self.stretches.clear()
        self._more.clear()

    def end(self) -> None:
        """The user's code has ended: later pauses are in gpulab's own work."""
        self.over = True

    def place(self, t_ns: int, frame: FrameType | None) -> None:
        """Remember the user's line, found from this frame, for the mark of that time; only for the first marks."""
        if len(self.spots) < 3 * MOST:
            self.spots[t_ns] = users_spot(frame)

    def begin_training(self) -> None:
        """A backward pass begins, or an optimizer has stepped."""
        if self._first_trained is None:
            self._first_trained = perf_counter_ns(), dict(self._more)

    def read(self, marks: Marks) -> None:
        """Read these marks. While one loader feeds the training, only its batches are counted."""
        if len(marks) < _FEW_MARKS:
            for mark in marks.tolist():
                self._read_mark(*mark)
            return
        turns = np.flatnonzero(np.isin(marks["kind"], _TURNS)).tolist()
        at = 0
        for until in (*turns, len(marks)):
            between = marks[at:until]
            if not len(between) or not self._is_steady(between):
                for mark in between.tolist():
                    self._read_mark(*mark)
            for mark in marks[until : until + 1].tolist():
                self._read_mark(*mark)
            at = until + 1

    def _is_steady(self, marks: Marks) -> bool:
        steady = not self._grad_off.depth and self._eval_mode.began is None
        return steady and not self._stopped and self._passes.read_steady(marks)

    def _read_mark(self, t_ns: int, kind: int, argument: int) -> None:
        if self._stopped:
            return
        passes = self._passes
        match kind:
            case Kind.ASK | Kind.ITER:
                self._add_passes(passes.request(argument, t_ns, fresh=kind == Kind.ITER, spot=self.spots.get(t_ns)))
            case Kind.GOT | Kind.END | Kind.ITERATOR:
                passes.answer(t_ns, batch=kind == Kind.GOT, end=kind == Kind.END)
            case Kind.BACKWARD | Kind.STEPPED:
                self._grad_off.train()
                self._eval_mode.train(t_ns)
                self._add_passes(passes.train())
            case Kind.GRAD_OFF:
                self._grad_off.enter(t_ns)
            case Kind.GRAD_ON:
                self._grad_off.exit(t_ns, self.spots.get(t_ns))
            case Kind.EVAL | Kind.TRAIN:
                self._eval_mode.switch(t_ns, self.spots.get(t_ns), trains=kind == Kind.TRAIN)
            case Kind.STOP:
                self._stopped = True

    def finish(self, starts_ns: NDArray[np.int64], *, trains: bool, loop: Stack = ()) -> tuple[PauseSum, ...]:
        """End the run; returns sums of the short pauses. `starts_ns`: of its steps, [n]. `loop`: lines of an update.

        `trains`: if nothing is trained, loading and code without gradients are the job itself and no evaluation.
        """
        self.over = True
        self._add_passes(self._passes.finish())
        if not trains:
            self.stretches = [pause for pause in self.stretches if pause.kind != "evaluation"]
        evaluations = self._grad_off.evaluations(self._evaluated, starts_ns) if trains else ()
        for s in self._eval_mode.widened(evaluations, loop):
            self._add_stretch(s)
        if len(starts_ns):
            self._forget_collections(int(starts_ns[min(1, len(starts_ns) - 1)]))
        self.stretches.sort(key=lambda pause: (pause.start_ns, pause.end_ns))
        return tuple(PauseSum(kind, count, total) for kind, (count, total) in self._more.items())

    def recorded(self, origin_ns: int, naming: Naming) -> tuple[Pause, ...]:
        """The pauses on the run's clock, without those before it began."""
        because = _recompiled_because() if any(p.kind == "compile" for p in self.stretches) else {}
        return tuple(
            Pause(
                p.kind,
                p.start_ns - origin_ns,
                p.end_ns - origin_ns,
                naming.number(p.spot),
                because.get(p.detail, p.detail),
            )
            for p in self.stretches
            if p.start_ns >= origin_ns
        )

    @property
    def grad_off_ns(self) -> Intervals:
        """When gradients were switched off, [n, 2], on the clock of the marks; only the beginning of a long run."""
        return np.array(self._grad_off.off_ns, np.int64).reshape(-1, 2)

    def _forget_collections(self, second_step_ns: int) -> None:
        """Drop garbage collections before the second step: most belong to imports."""
        self.stretches = [pause for pause in self.stretches if pause.kind != "gc" or pause.end_ns > second_step_ns]
        if self._first_trained is not None and self._first_trained[0] <= second_step_ns:
            count, total_ns = self._more.pop("gc", (0, 0))
            before, before_ns = self._first_trained[1].get("gc", (0, 0))
            if count > before:
                self._more["gc"] = (count - before, total_ns - before_ns)

    def _add_passes(self, passes: tuple[Pass, ...]) -> None:
        for p in passes:
            detail = f"{p.batches:,} batch" + ("" if p.batches == 1 else "es")
            self._evaluated.append(Stretch(p.start_ns, p.last_ns, p.spot, detail))

    def _add_stretch(self, pause: Stretch) -> None:
        if len(self.stretches) < MOST:
            self.stretches.append(pause)
        else:
            self._count(pause.kind, pause.end_ns - pause.start_ns)

    def _count(self, kind: PauseKind, took_ns: int) -> None:
        count, total_ns = self._more.get(kind, (0, 0))
        self._more[kind] = (count + 1, total_ns + took_ns)


def _recompiled_because() -> dict[str, str]:
    """By the id of a compilation that torch still knows: what was compiled and, if again, why."""
    utils = sys.modules.get("torch._dynamo.utils")
    try:
        metrics = utils.get_compilation_metrics() if utils is not None else ()
        compilations = {
            str(m.compile_id): (m.co_name, getattr(m, "recompile_reason", None)) for m in metrics if m.co_name
        }
    except Exception:  # torch's internal data, whose shape has changed before
        return {}
    return {i: f"{name}, again: {why}" if why else str(name) for i, (name, why) in compilations.items()}


_MOST = 10_000
_END = 1 << 62


class _Span(Struct, frozen=True):
    """Time in evaluation mode without training. `function`: file and name; None if training ended it."""

    start_ns: int
    end_ns: int
    function: tuple[str, str] | None


class EvalMode:
    """Finds how far an evaluation, from `eval()` to `train()`, reaches beyond the code without gradients."""

    def __init__(self) -> None:
        self.began: tuple[int, tuple[str, str] | None] | None = None
        self._spans: list[_Span] = []

    def switch(self, t_ns: int, spot: Spot | None, *, trains: bool) -> None:
        """`model.train()` has returned, or `model.eval()` begins, called at this line."""
        function = None if spot is None else (spot[0], spot[2])
        if not trains:
            self.began = self.began or (t_ns, function)
        elif self.began is not None:
            began_ns, began_in = self.began
            self.began = None
            self._add_stretch(_Span(began_ns, t_ns, function if function == began_in else None))

    def train(self, t_ns: int) -> None:
        """A backward pass has begun or an optimizer has stepped: evaluation is over."""
        if self.began is not None:
            start_ns, _ = self.began
            self.began = None
            self._add_stretch(_Span(start_ns, t_ns, None))

    def widened(self, evaluations: Sequence[Stretch], loop: Stack) -> tuple[Stretch, ...]:
        """Extend evaluations to the start of evaluation mode, and in a function outside the loop also to its end."""
        self.train(_END)
        training = {(file, function) for file, _, function in loop}
        starts = [span.start_ns for span in self._spans]
        wider: dict[int, Stretch] = {}
        rest: list[Stretch] = []
        after_ns = 0
        for s in sorted(evaluations, key=lambda s: s.start_ns):
            row = bisect_right(starts, s.start_ns) - 1
            span = self._spans[row] if row >= 0 else None
            if span is None or span.start_ns < after_ns or span.end_ns < s.end_ns:
                rest.append(s)
            elif training and span.function is not None and span.function not in training:
                wider.setdefault(row, replace(s, start_ns=span.start_ns, end_ns=span.end_ns))
            else:
                rest.append(replace(s, start_ns=span.start_ns))
                after_ns = s.end_ns
        return tuple(sorted([*wider.values(), *rest], key=lambda s: s.start_ns))

    def _add_stretch(self, span: _Span) -> None:
        if len(self._spans) < _MOST:
            self._spans.append(span)


_MOST_ABANDONED = 32  # passes that the loop left early and may continue


class Pass(Struct, eq=False):
    """One pass over a loader, on the clock of the marks. `spot` is the line of the first request."""

    loader: int
    start_ns: int
    last_ns: int
    spot: Spot | None = None
    batches: int = 0
    trains: bool = False


class Passes:
    """Finds passes over a loader that are evaluation; its methods return passes now known to be evaluation."""

    def __init__(self) -> None:
        self._open: dict[int, Pass] = {}  # by loader, the newest answer last
        self._ended: list[Pass] = []  # ended without training since the last request; its batch may still be trained on
        self._abandoned: list[Pass] = []  # open while training goes on: left early, unless the loader gets a request
        self._feeders: set[int] = set()
        self._asking: list[int] = []
        self.steady = False  # the only open pass feeds the training, and none has begun or ended since

    def request(self, loader: int, t_ns: int, *, fresh: bool, spot: Spot | None = None) -> tuple[Pass, ...]:
        """The loop requests a batch or a new iterator from a loader."""
        self._asking.append(loader)
        if len(self._asking) > 1:  # a loader within a loader
            return ()
        evaluated: tuple[Pass, ...] = ()
        if self._ended:
            evaluated, self._ended = tuple(self._ended), []
        if fresh:
            self.steady = False
            old = self._open.pop(loader, None)
            if old is not None and not old.trains and old.batches:
                self._abandoned.append(old)
            self._open[loader] = Pass(loader, t_ns, t_ns, spot)
        elif self._abandoned and loader not in self._open:
            self._resume(loader)
        return evaluated

    def _resume(self, loader: int) -> None:
        """A pass that seemed abandoned goes on: it feeds the training, together with another."""
        self.steady = False
        old = next((p for p in reversed(self._abandoned) if p.loader == loader), None)
        if old is not None:
            self._abandoned.remove(old)
            old.trains = True
            self._open[loader] = old
            self._feeders.add(loader)

    def answer(self, t_ns: int, *, batch: bool, end: bool) -> None:
        """The loader with the last request has answered: with a batch, or with the end."""
        if not self._asking:
            return
        loader = self._asking.pop()
        newest = self._open.get(loader)
        if self._asking or newest is None:
            return
        newest.last_ns = t_ns
        newest.batches += batch
        if end or len(self._open) > 1:
            self.steady = False
            del self._open[loader]
            if not end:
                self._open[loader] = newest  # as the newest
        if not end:
            return
        if newest.batches and not newest.trains:
            self._ended.append(newest)

    def train(self) -> tuple[Pass, ...]:
        """Training goes on, with a batch of a loader that has fed it before, else of the loader that answered last."""
        if len(self._open) == 1 and next(iter(self._open.values())).trains:
            self.steady = True  # the usual case
            return ()
        active = [p for p in self._open.values() if p.batches]
        if not active:  # the batch is of an ended pass: Accelerate requests the end ahead
            self._feeders.update(p.loader for p in self._ended)
            self._ended = []
            return ()
        feeder = next((p for p in reversed(active) if p.loader in self._feeders), active[-1])
        feeder.trains = True
        self._feeders.add(feeder.loader)
        for other in active:
            if not other.trains:
                del self._open[other.loader]
                self._abandoned.append(other)
        if len(self._abandoned) <= 2 * _MOST_ABANDONED:
            return ()
        settled, self._abandoned = self._abandoned[:-_MOST_ABANDONED], self._abandoned[-_MOST_ABANDONED:]
        return tuple(p for p in settled if p.loader not in self._feeders)

    def read_steady(self, marks: Marks) -> bool:
        """Read marks in which the only open pass feeds the training; False, and nothing read, if there is more."""
        if not self.steady or self._ended or self._abandoned or len(self._asking) > 1:
            return False
        newest = next(iter(self._open.values()))
        kinds = marks["kind"]
        request = np.isin(kinds, (Kind.ASK, Kind.GOT))
        answers = kinds[request] == Kind.GOT
        loaders = marks["argument"][kinds == Kind.ASK]
        if (loaders != newest.loader).any() or (self._asking and self._asking != [newest.loader]):
            return False
        if len(answers) and (answers[0] != bool(self._asking) or (answers[1:] == answers[:-1]).any()):
            return False
        if len(answers):
            self._asking = [] if answers[-1] else [newest.loader]
            newest.batches += int(answers.sum())
            newest.last_ns = int(marks["t_ns"][request][answers][-1]) if answers.any() else newest.last_ns
        return True

    def finish(self) -> tuple[Pass, ...]:
        rest = [*self._abandoned, *(p for p in self._open.values() if not p.trains and p.batches)]
        evaluated = (*self._ended, *(p for p in rest if p.loader not in self._feeders))
        self._abandoned, self._open, self._ended = [], {}, []
        return evaluated


SHORTEST_NS = 1_000_000  # of a pause that is recorded individually
MOST = 10_000
SHORT_MOST = 2_000
_FEWEST = 4  # ours: fewer short pauses at a line may be chance
USUAL = 0.5  # of the steps: a stretch that occurs in more of them is part of training


class GradOff:
    """Finds the stretches in which gradients are switched off, and which of them are evaluation."""

    def __init__(self) -> None:
        self.depth = 0  # of nested switches
        self._start_ns = 0
        self.off_ns = array("q")  # start and end of the first stretches, alternating
        self._stretches: list[Stretch] = []
        self._short: list[Stretch] = []  # the first ones, to see whether most steps have one at that line

    def enter(self, t_ns: int) -> None:
        """Gradients are switched off."""
        if not self.depth:
            self._start_ns = t_ns
        self.depth += 1

    def exit(self, t_ns: int, spot: Spot | None) -> None:
        """Gradients are restored."""
        if not self.depth:  # switched off before the run, or training went on meanwhile
            return
        self.depth -= 1
        if self.depth:
            return
        if len(self.off_ns) < _MOST_OFF:
            self.off_ns.extend((self._start_ns, t_ns))
        if t_ns - self._start_ns < SHORTEST_NS:
            if len(self._short) < SHORT_MOST:
                self._short.append(Stretch(self._start_ns, t_ns, spot))
        elif len(self._stretches) < MOST:
            self._stretches.append(Stretch(self._start_ns, t_ns, spot))

    def train(self) -> None:
        """A backward pass has begun or an optimizer has stepped: the current stretch is no evaluation."""
        self.depth = 0

    def evaluations(self, passes: Sequence[Stretch], starts_ns: NDArray[np.int64]) -> tuple[Stretch, ...]:
        """The stretches and passes over a loader that are evaluation. `starts_ns`: of the run's steps, [n].

        A pass within a stretch gets the stretch's length: the work on its last batch follows the loader's last answer.
        """
        usual = {line[0].spot for line in _by_line(self._short) if len(line) >= _FEWEST and _usual(line, starts_ns)}
        lines = [line for line in _by_line(self._stretches) if line[0].spot not in usual]
        unusual = [s for line in lines for s in ([] if _usual(line, starts_ns) else line)]
        passes = sorted(passes, key=lambda p: p.start_ns)
        starts = [p.start_ns for p in passes]
        ends = list(accumulate((p.end_ns for p in passes), max))
        evaluations: list[Stretch | None] = list(passes)
        for one in unusual:
            touched = slice(bisect_right(ends, one.start_ns), bisect_left(starts, one.end_ns))
            if not passes[touched]:
                evaluations.append(one)
            elif all(one.start_ns <= p.start_ns and p.end_ns <= one.end_ns for p in passes[touched]):
                evaluations[touched] = [None] * len(passes[touched])
                evaluations.append(replace(passes[touched][0], start_ns=one.start_ns, end_ns=one.end_ns))
        return tuple(s for s in evaluations if s is not None)


def _by_line(stretches: Sequence[Stretch]) -> Iterable[list[Stretch]]:
    lines: dict[Spot | None, list[Stretch]] = {}
    for one in stretches:
        lines.setdefault(one.spot, []).append(one)
    return lines.values()


def _usual(stretches: Sequence[Stretch], starts_ns: NDArray[np.int64]) -> bool:
    """Whether most of the steps so far contain a stretch."""
    steps = np.searchsorted(starts_ns, [s.start_ns for s in stretches], side="right")
    return len(np.unique(steps)) > USUAL * int(np.searchsorted(starts_ns, stretches[-1].end_ns, side="right"))
