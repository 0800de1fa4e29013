"""Which stretches of the training thread's time run without gradients: a text sampled, a test on held data.

Pure: knows times only, as `pause_hooks` tells them. What is done so in most steps belongs to training (a teacher's
pass, averaged weights), so that only the end of the run tells which stretches are evaluation.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from gpulab.capture.stacks.stack import Spot

SHORTEST_NS = 1_000_000  # of a pause that is kept by itself
MOST = 10_000
_SHORT_MOST = 2_000
_FEWEST = 4  # ours: of fewer short ones at a line, chance speaks
USUAL = 0.5  # of the steps: what is done in more of them is a part of training


class Stretch(Struct, frozen=True):
    """One, on the clock of the marks; `spot` is the line of the user's that it belongs to."""

    start_ns: int
    end_ns: int
    spot: Spot | None = None
    detail: str = "without gradients"


class GradOff:
    """Hears where gradients are switched off and on again, and where training goes on."""

    def __init__(self) -> None:
        self.depth = 0  # of switches that gradients are off by
        self._start_ns = 0
        self._stretches: list[Stretch] = []
        self._short: list[Stretch] = []  # the first ones: only whether most steps hold one at that line counts

    def entered(self, t_ns: int) -> None:
        """Gradients are off from here, unless they were before."""
        if not self.depth:
            self._start_ns = t_ns
        self.depth += 1

    def left(self, t_ns: int, spot: Callable[[], Spot | None]) -> None:
        """They are as before. `spot` is only asked for what is kept."""
        if not self.depth:  # entered before the run, or training went on within
            return
        self.depth -= 1
        if self.depth:
            return
        if t_ns - self._start_ns < SHORTEST_NS:
            if len(self._short) < _SHORT_MOST:
                self._short.append(Stretch(self._start_ns, t_ns, spot()))
        elif len(self._stretches) < MOST:
            self._stretches.append(Stretch(self._start_ns, t_ns, spot()))

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
