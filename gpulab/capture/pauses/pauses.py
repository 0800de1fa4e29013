"""Stretches of the training thread's time in which nothing is trained: saving, evaluation, logging, garbage, compiling.

Heard in all steps, so it must be cheap: what is shorter than a millisecond is only counted. Pure but for the clock:
`pause_hooks` tells when something began and ended.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from threading import get_ident
from time import perf_counter_ns
from types import FrameType

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from gpulab.capture.pauses.loader_passes import Pass, Passes
from gpulab.capture.pauses.no_grad import MOST, SHORTEST_NS, GradOff, Stretch
from gpulab.capture.pauses.source_lines import Stack, users_spot
from gpulab.capture.stacks.stack import Spot
from gpulab.run import PauseKind, PauseSum

_KEPT_ALWAYS: tuple[PauseKind, ...] = ("checkpoint_save", "evaluation", "compile")  # few, and each is somebody's wish

Heard = tuple[PauseKind, int, int, Spot | None, str]  # kind, start and end (`time.perf_counter_ns`), line, detail


class Calls:
    """The calls that were timed as a whole, none within another; what is evaluated inside of one is a part of it."""

    def __init__(self, heard: list[Heard]) -> None:
        calls = ((p[1], p[2], i) for i, p in enumerate(heard) if p[0] not in ("gc", "compile"))
        self._calls = sorted(calls)
        self._evaluating_ns: dict[int, int] = {}

    def hold(self, start_ns: int, end_ns: int) -> bool:
        """Whether one of them holds that stretch of evaluation."""
        i = bisect_right(self._calls, (start_ns, 1 << 62, 0)) - 1
        if i < 0 or self._calls[i][1] < end_ns:
            return False
        number = self._calls[i][2]
        self._evaluating_ns[number] = self._evaluating_ns.get(number, 0) + end_ns - start_ns
        return True

    def rename(self, heard: list[Heard]) -> None:
        """A callback that evaluates for at least half of its time is evaluation."""
        for i, evaluating_ns in self._evaluating_ns.items():
            kind, start_ns, end_ns, spot, detail = heard[i]
            if kind == "callback" and 2 * evaluating_ns >= end_ns - start_ns:
                heard[i] = ("evaluation", start_ns, end_ns, spot, detail)


class Pauses:
    """Collects the pauses of one run, of the thread that made this."""

    def __init__(self) -> None:
        self._thread = get_ident()
        self._process = os.getpid()
        self.heard: list[Heard] = []
        self._more: dict[PauseKind, tuple[int, int]] = {}
        self.passes = Passes()
        self._evaluated: list[Stretch] = []
        self.grad_off = GradOff()
        self._begins_ns = 0
        self._first_trained: tuple[int, dict[PauseKind, tuple[int, int]]] | None = (
            None  # when, what was counted by then
        )
        self.eval_mode = EvalMode()
        self.over = False
        self.trainings = 0  # backward passes and optimizer steps

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
        spot: Spot | None = None,
    ) -> None:
        """Something has paused the training. `frame` is where it was asked for, `spot` where it is written."""
        if os.getpid() != self._process or self.over or start_ns < self._begins_ns:
            return
        if end_ns - start_ns >= SHORTEST_NS or kind in _KEPT_ALWAYS:
            self._keep(kind, start_ns, end_ns, spot or users_spot(frame), detail)
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

    def asked(self, loader: int, frame: FrameType | None, t_ns: int, *, fresh: bool) -> None:
        """A loader is asked for a batch, or (`fresh`) for a new iterator."""
        spot = users_spot(frame) if fresh else None
        evaluated = self.passes.asked(loader, t_ns, fresh=fresh, spot=spot)
        if evaluated:
            self._note(evaluated)

    def trained(self) -> None:
        """A backward pass begins, or an optimizer has stepped."""
        if self._first_trained is None:
            self._first_trained = perf_counter_ns(), dict(self._more)
        self.trainings += 1
        if self.grad_off.depth:
            self.grad_off.trained()
        if self.eval_mode.began is not None:
            self.eval_mode.trained()
        if not self.passes.steady:
            self._note(self.passes.trained())

    def finish(self, starts_ns: NDArray[np.int64], *, trains: bool, loop: Stack = ()) -> tuple[PauseSum, ...]:
        """The run is over: hear no more. `starts_ns`: of its steps, [n]. `loop`: the lines that led to an update.

        `trains`: without training, what only fetches or needs no gradients is no evaluation but the job.
        """
        self.over = True
        self._note(self.passes.finish())
        if not trains:
            self.heard = [pause for pause in self.heard if pause[0] != "evaluation"]
        calls = Calls(self.heard)
        evaluations = self.grad_off.evaluations(self._evaluated, starts_ns) if trains else ()
        for s in self.eval_mode.widened(evaluations, loop):
            if not calls.hold(s.start_ns, s.end_ns):
                self._keep("evaluation", s.start_ns, s.end_ns, s.spot, s.detail)
        calls.rename(self.heard)
        if len(starts_ns):
            self._forget_collections(int(starts_ns[min(1, len(starts_ns) - 1)]))
        self.heard.sort(key=lambda pause: pause[1:3])
        return tuple(PauseSum(kind, count, total) for kind, (count, total) in self._more.items())

    def _forget_collections(self, second_step_ns: int) -> None:
        """Garbage that was collected before the second step, mostly while modules were imported, is start-up."""
        self.heard = [pause for pause in self.heard if pause[0] != "gc" or pause[2] > second_step_ns]
        if self._first_trained is not None and self._first_trained[0] <= second_step_ns:
            count, total_ns = self._more.pop("gc", (0, 0))
            before, before_ns = self._first_trained[1].get("gc", (0, 0))
            if count > before:
                self._more["gc"] = (count - before, total_ns - before_ns)

    def _note(self, passes: tuple[Pass, ...]) -> None:
        for p in passes:
            detail = f"{p.batches:,} batch" + ("" if p.batches == 1 else "es")
            self._evaluated.append(Stretch(p.start_ns, p.last_ns, p.spot, detail))

    def _keep(self, kind: PauseKind, start_ns: int, end_ns: int, spot: Spot | None, detail: str) -> None:
        if len(self.heard) < MOST:
            self.heard.append((kind, start_ns, end_ns, spot, detail))
        else:
            self._count(kind, end_ns - start_ns)

    def _count(self, kind: PauseKind, took_ns: int) -> None:
        count, total_ns = self._more.get(kind, (0, 0))
        self._more[kind] = (count + 1, total_ns + took_ns)


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

    def switched(self, start_ns: int, end_ns: int, spot: Spot | None, *, trains: bool) -> None:
        """`model.train()` or `model.eval()`, asked for at this line."""
        function = None if spot is None else (spot[0], spot[2])
        if not trains:
            self.began = self.began or (start_ns, function)
        elif self.began is not None:
            began_ns, began_in = self.began
            self.began = None
            self._keep(_Span(began_ns, end_ns, function if function == began_in else None))

    def trained(self, t_ns: int | None = None) -> None:
        """A backward pass or an optimizer's step: what was evaluated was so before. None: the time is now."""
        if self.began is not None:
            start_ns, _ = self.began
            self.began = None
            self._keep(_Span(start_ns, perf_counter_ns() if t_ns is None else t_ns, None))

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
