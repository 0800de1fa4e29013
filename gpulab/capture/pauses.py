"""Stretches of the training thread's time in which nothing is trained: saving, evaluation, garbage, compiling.

Heard in all steps, so it must be cheap: what is shorter than a millisecond is only counted. `hooks.py`
tells when something began and ended; what needs no gradients is read off the marks.
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

_KEPT_ALWAYS: tuple[PauseKind, ...] = ("checkpoint_save", "evaluation", "compile")  # few, and each is somebody's wish

_MOST_OFF = 200_000  # times: a run that needs more has shown by then what it does without gradients
_FEW_MARKS = 32  # these are read one by one
_TURNS = (Kind.ITER, Kind.ITERATOR, Kind.END, Kind.GRAD_OFF, Kind.GRAD_ON, Kind.EVAL, Kind.TRAIN, Kind.STOP)


class Stretch(Struct, frozen=True):
    """Of the training thread's time, on the clock of the marks; `spot` is the line of the user's that it belongs to."""

    start_ns: int
    end_ns: int
    spot: Spot | None = None
    detail: str = "without gradients"
    kind: PauseKind = "evaluation"


class Pauses:
    """Collects the pauses of one run, of the thread that made this."""

    def __init__(self) -> None:
        self._thread = get_ident()
        self._process = os.getpid()
        self.heard: list[Stretch] = []
        self._more: dict[PauseKind, tuple[int, int]] = {}
        self.spots: dict[int, Spot | None] = {}  # the user's line that a mark of that time comes from
        self.begin_anew()
        self._begins_ns = 0
        # when, and what was counted by then
        self._first_trained: tuple[int, dict[PauseKind, tuple[int, int]]] | None = None
        self.over = False

    def begin_anew(self) -> None:
        """Read from the first mark on."""
        self._passes, self._grad_off, self._eval_mode = Passes(), GradOff(), EvalMode()
        self._evaluated: list[Stretch] = []
        self._stopped = False

    def hears(self) -> bool:
        """Whether what happens on this thread counts: not on another one, not in a forked worker, not after the run."""
        return get_ident() == self._thread and not self.over

    def add(
        self,
        kind: PauseKind,
        start_ns: int,
        end_ns: int,
        frame: FrameType | None,
        detail: str = "",
    ) -> None:
        """Something has paused the training. `frame` is where it was asked for."""
        if os.getpid() != self._process or self.over or start_ns < self._begins_ns:
            return
        if end_ns - start_ns >= SHORTEST_NS or kind in _KEPT_ALWAYS:
            self._keep(Stretch(start_ns, end_ns, users_spot(frame), detail, kind))
        else:
            self._count(kind, end_ns - start_ns)

    def begin(self, now_ns: int) -> None:
        """The user's code begins: what began earlier paused gpulab's own start."""
        self._begins_ns = now_ns
        self.heard.clear()
        self._more.clear()

    def end(self) -> None:
        """The user's code has ended: what comes now pauses gpulab's own work."""
        self.over = True

    def place(self, t_ns: int, frame: FrameType | None) -> None:
        """The mark of that time comes from the user's line in this frame; the first ones are remembered."""
        if len(self.spots) < 3 * MOST:
            self.spots[t_ns] = users_spot(frame)

    def begin_training(self) -> None:
        """A backward pass begins, or an optimizer has stepped."""
        if self._first_trained is None:
            self._first_trained = perf_counter_ns(), dict(self._more)

    def read(self, marks: Marks) -> None:
        """Go on with these marks. While one loader feeds the training there is nothing to tell but its batches."""
        if len(marks) < _FEW_MARKS:
            for mark in marks.tolist():
                self._hear(*mark)
            return
        turns = np.flatnonzero(np.isin(marks["kind"], _TURNS)).tolist()
        at = 0
        for until in (*turns, len(marks)):
            between = marks[at:until]
            if not len(between) or not self._is_steady(between):
                for mark in between.tolist():
                    self._hear(*mark)
            for mark in marks[until : until + 1].tolist():
                self._hear(*mark)
            at = until + 1

    def _is_steady(self, marks: Marks) -> bool:
        steady = not self._grad_off.depth and self._eval_mode.began is None
        return steady and not self._stopped and self._passes.go_on(marks)

    def _hear(self, t_ns: int, kind: int, argument: int) -> None:
        if self._stopped:
            return
        passes = self._passes
        match kind:
            case Kind.ASK | Kind.ITER:
                self._note(passes.asked(argument, t_ns, fresh=kind == Kind.ITER, spot=self.spots.get(t_ns)))
            case Kind.GOT | Kind.END | Kind.ITERATOR:
                passes.answered(t_ns, batch=kind == Kind.GOT, end=kind == Kind.END)
            case Kind.BACKWARD | Kind.STEPPED:
                self._grad_off.trained()
                self._eval_mode.trained(t_ns)
                self._note(passes.trained())
            case Kind.GRAD_OFF:
                self._grad_off.entered(t_ns)
            case Kind.GRAD_ON:
                self._grad_off.left(t_ns, self.spots.get(t_ns))
            case Kind.EVAL | Kind.TRAIN:
                self._eval_mode.switched(t_ns, self.spots.get(t_ns), trains=kind == Kind.TRAIN)
            case Kind.STOP:
                self._stopped = True

    def finish(self, starts_ns: NDArray[np.int64], *, trains: bool, loop: Stack = ()) -> tuple[PauseSum, ...]:
        """The run is over: hear no more. `starts_ns`: of its steps, [n]. `loop`: the lines that led to an update.

        `trains`: without training, what only fetches or needs no gradients is no evaluation but the job.
        """
        self.over = True
        self._note(self._passes.finish())
        if not trains:
            self.heard = [pause for pause in self.heard if pause.kind != "evaluation"]
        evaluations = self._grad_off.evaluations(self._evaluated, starts_ns) if trains else ()
        for s in self._eval_mode.widened(evaluations, loop):
            self._keep(s)
        if len(starts_ns):
            self._forget_collections(int(starts_ns[min(1, len(starts_ns) - 1)]))
        self.heard.sort(key=lambda pause: (pause.start_ns, pause.end_ns))
        return tuple(PauseSum(kind, count, total) for kind, (count, total) in self._more.items())

    def recorded(self, origin_ns: int, naming: Naming) -> tuple[Pause, ...]:
        """On the run's clock, without those from before the run began: its own start."""
        because = _recompiled_because() if any(p.kind == "compile" for p in self.heard) else {}
        return tuple(
            Pause(
                p.kind,
                p.start_ns - origin_ns,
                p.end_ns - origin_ns,
                naming.number(p.spot),
                because.get(p.detail, p.detail),
            )
            for p in self.heard
            if p.start_ns >= origin_ns
        )

    @property
    def grad_off_ns(self) -> Intervals:
        """When gradients were switched off, [n, 2], on the clock of the marks; of a long run its beginning."""
        return np.array(self._grad_off.off_ns, np.int64).reshape(-1, 2)

    def _forget_collections(self, second_step_ns: int) -> None:
        """Garbage that was collected before the second step, mostly while modules were imported, is start-up."""
        self.heard = [pause for pause in self.heard if pause.kind != "gc" or pause.end_ns > second_step_ns]
        if self._first_trained is not None and self._first_trained[0] <= second_step_ns:
            count, total_ns = self._more.pop("gc", (0, 0))
            before, before_ns = self._first_trained[1].get("gc", (0, 0))
            if count > before:
                self._more["gc"] = (count - before, total_ns - before_ns)

    def _note(self, passes: tuple[Pass, ...]) -> None:
        for p in passes:
            detail = f"{p.batches:,} batch" + ("" if p.batches == 1 else "es")
            self._evaluated.append(Stretch(p.start_ns, p.last_ns, p.spot, detail))

    def _keep(self, pause: Stretch) -> None:
        if len(self.heard) < MOST:
            self.heard.append(pause)
        else:
            self._count(pause.kind, pause.end_ns - pause.start_ns)

    def _count(self, kind: PauseKind, took_ns: int) -> None:
        count, total_ns = self._more.get(kind, (0, 0))
        self._more[kind] = (count + 1, total_ns + took_ns)


def _recompiled_because() -> dict[str, str]:
    """Of each compilation of this process that torch still knows: why it was done again, or what was compiled."""
    utils = sys.modules.get("torch._dynamo.utils")
    try:
        metrics = utils.get_compilation_metrics() if utils is not None else ()
        compilations = {
            str(m.compile_id): (m.co_name, getattr(m, "recompile_reason", None)) for m in metrics if m.co_name
        }
    except Exception:  # torch's own bookkeeping: it has changed its shape before
        return {}
    return {i: f"{name}, again: {why}" if why else str(name) for i, (name, why) in compilations.items()}


# From `model.eval()` to `model.train()`: how far an evaluation reaches beyond the code that needs no gradients.


_MOST = 10_000
_END = 1 << 62


class _Span(Struct, frozen=True):
    """In evaluation mode, without training. `function`: file and name; None where training has ended it."""

    start_ns: int
    end_ns: int
    function: tuple[str, str] | None


class EvalMode:
    """Hears where a model is switched over and back, and where training goes on."""

    def __init__(self) -> None:
        self.began: tuple[int, tuple[str, str] | None] | None = None
        self._spans: list[_Span] = []

    def switched(self, t_ns: int, spot: Spot | None, *, trains: bool) -> None:
        """`model.train()` or `model.eval()`, asked for at this line: when the first was over, when the other began."""
        function = None if spot is None else (spot[0], spot[2])
        if not trains:
            self.began = self.began or (t_ns, function)
        elif self.began is not None:
            began_ns, began_in = self.began
            self.began = None
            self._keep(_Span(began_ns, t_ns, function if function == began_in else None))

    def trained(self, t_ns: int) -> None:
        """A backward pass or an optimizer's step: what was evaluated was so before."""
        if self.began is not None:
            start_ns, _ = self.began
            self.began = None
            self._keep(_Span(start_ns, t_ns, None))

    def widened(self, evaluations: Sequence[Stretch], loop: Stack) -> tuple[Stretch, ...]:
        """The same evaluations from where they began; to where they ended, in a function that is none of the loop's."""
        self.trained(_END)
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

    def _keep(self, span: _Span) -> None:
        if len(self._spans) < _MOST:
            self._spans.append(span)


_LEFT_KEPT = 32  # passes left early that may yet go on


class Pass(Struct, eq=False):
    """One pass; times on the clock of the marks. `spot` is the line that asked first."""

    loader: int
    start_ns: int
    last_ns: int
    spot: Spot | None = None
    batches: int = 0
    trains: bool = False


class Passes:
    """Hears the marks of a loop; methods that return passes say which have turned out to be evaluation."""

    def __init__(self) -> None:
        self._open: dict[int, Pass] = {}  # by loader, the newest answer last
        self._ended: list[Pass] = []  # the newest that ended without training: its batch may be trained on even now
        self._left: list[Pass] = []  # open, and training has gone on since: left early, unless asked again
        self._feeders: set[int] = set()
        self._asking: list[int] = []
        self.steady = False  # training went on with the only pass that is open, and none was begun or ended since

    def asked(self, loader: int, t_ns: int, *, fresh: bool, spot: Spot | None = None) -> tuple[Pass, ...]:
        """A loader is asked for a batch, or for a new iterator."""
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
                self._left.append(old)
            self._open[loader] = Pass(loader, t_ns, t_ns, spot)
        elif self._left and loader not in self._open:
            self._go_on(loader)
        return evaluated

    def _go_on(self, loader: int) -> None:
        """A pass that seemed to be left is asked again: it feeds the training, together with another."""
        self.steady = False
        old = next((p for p in reversed(self._left) if p.loader == loader), None)
        if old is not None:
            self._left.remove(old)
            old.trains = True
            self._open[loader] = old
            self._feeders.add(loader)

    def answered(self, t_ns: int, *, batch: bool, end: bool) -> None:
        """The loader that was asked last has answered: with a batch, or that it has none left."""
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

    def trained(self) -> tuple[Pass, ...]:
        """Training goes on, with a batch of the loader that is known to feed it, else of the one that answered last."""
        if len(self._open) == 1 and next(iter(self._open.values())).trains:
            self.steady = True  # nearly always
            return ()
        given = [p for p in self._open.values() if p.batches]
        if not given:  # the batch is of a pass that has ended: its end was asked for ahead (Accelerate)
            self._feeders.update(p.loader for p in self._ended)
            self._ended = []
            return ()
        feeder = next((p for p in reversed(given) if p.loader in self._feeders), given[-1])
        feeder.trains = True
        self._feeders.add(feeder.loader)
        for other in given:
            if not other.trains:
                del self._open[other.loader]
                self._left.append(other)
        if len(self._left) <= 2 * _LEFT_KEPT:
            return ()
        settled, self._left = self._left[:-_LEFT_KEPT], self._left[-_LEFT_KEPT:]
        return tuple(p for p in settled if p.loader not in self._feeders)

    def go_on(self, marks: Marks) -> bool:
        """Whether these marks are more of the same: the only pass that is open feeds the training."""
        if not self.steady or self._ended or self._left or len(self._asking) > 1:
            return False
        newest = next(iter(self._open.values()))
        kinds = marks["kind"]
        asked = np.isin(kinds, (Kind.ASK, Kind.GOT))
        answers = kinds[asked] == Kind.GOT
        loaders = marks["argument"][kinds == Kind.ASK]
        if (loaders != newest.loader).any() or (self._asking and self._asking != [newest.loader]):
            return False
        if len(answers) and (answers[0] != bool(self._asking) or (answers[1:] == answers[:-1]).any()):
            return False
        if len(answers):
            self._asking = [] if answers[-1] else [newest.loader]
            newest.batches += int(answers.sum())
            newest.last_ns = int(marks["t_ns"][asked][answers][-1]) if answers.any() else newest.last_ns
        return True

    def finish(self) -> tuple[Pass, ...]:
        rest = [*self._left, *(p for p in self._open.values() if not p.trains and p.batches)]
        evaluated = (*self._ended, *(p for p in rest if p.loader not in self._feeders))
        self._left, self._open, self._ended = [], {}, []
        return evaluated


SHORTEST_NS = 1_000_000  # of a pause that is kept by itself
MOST = 10_000
SHORT_MOST = 2_000
_FEWEST = 4  # ours: of fewer short ones at a line, chance speaks
USUAL = 0.5  # of the steps: what is done in more of them is a part of training


class GradOff:
    """Hears where gradients are switched off and on again, and where training goes on."""

    def __init__(self) -> None:
        self.depth = 0  # of switches that gradients are off by
        self._start_ns = 0
        self.off_ns = array("q")  # of the first ones, start and end by turns
        self._stretches: list[Stretch] = []
        self._short: list[Stretch] = []  # the first ones: only whether most steps hold one at that line counts

    def entered(self, t_ns: int) -> None:
        """Gradients are off from here, unless they were before."""
        if not self.depth:
            self._start_ns = t_ns
        self.depth += 1

    def left(self, t_ns: int, spot: Spot | None) -> None:
        """They are as before."""
        if not self.depth:  # entered before the run, or training went on within
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

    def trained(self) -> None:
        """A backward pass or an optimizer's step: what it falls into is no evaluation."""
        self.depth = 0

    def evaluations(self, passes: Sequence[Stretch], starts_ns: NDArray[np.int64]) -> tuple[Stretch, ...]:
        """With these passes over a loader, the stretches that are evaluation. `starts_ns`: of the run's steps, [n].

        A pass within a stretch lasts as long as that, for its last batch is worked on after the loader's last answer.
        """
        usual = {line[0].spot for line in _by_line(self._short) if len(line) >= _FEWEST and _usual(line, starts_ns)}
        lines = [line for line in _by_line(self._stretches) if line[0].spot not in usual]
        unusual = [s for line in lines for s in ([] if _usual(line, starts_ns) else line)]
        passes = sorted(passes, key=lambda p: p.start_ns)
        starts = [p.start_ns for p in passes]
        ends = list(accumulate((p.end_ns for p in passes), max))
        evaluations: list[Stretch | None] = list(passes)
        for stretch in unusual:
            touched = slice(bisect_right(ends, stretch.start_ns), bisect_left(starts, stretch.end_ns))
            if not passes[touched]:
                evaluations.append(stretch)
            elif all(stretch.start_ns <= p.start_ns and p.end_ns <= stretch.end_ns for p in passes[touched]):
                evaluations[touched] = [None] * len(passes[touched])
                evaluations.append(replace(passes[touched][0], start_ns=stretch.start_ns, end_ns=stretch.end_ns))
        return tuple(s for s in evaluations if s is not None)


def _by_line(stretches: Sequence[Stretch]) -> Iterable[list[Stretch]]:
    lines: dict[Spot | None, list[Stretch]] = {}
    for stretch in stretches:
        lines.setdefault(stretch.spot, []).append(stretch)
    return lines.values()


def _usual(stretches: Sequence[Stretch], starts_ns: NDArray[np.int64]) -> bool:
    """Whether most steps hold one, as far as they were kept."""
    steps = np.searchsorted(starts_ns, [s.start_ns for s in stretches], side="right")
    return len(np.unique(steps)) > USUAL * int(np.searchsorted(starts_ns, stretches[-1].end_ns, side="right"))
