"""The check of an exercise: unanswered, not yet right with a hint, undecided by what was measured, or right.

A check never raises for what a reader answers and never stops "Run All". Speed is judged by ratios against what the
same machine measured a moment before, never by absolute times.


The speed of an answer: it and what it replaces run in turn, and a check is decided by the interval alone.

A solution that does nothing and looks fast once, by chance, is undecided here or wrong: never right. One that is slow
while other programs take the cores is undecided, not wrong.
"""

from __future__ import annotations

import gc
import html
import os
import random
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from gpulab.analysis.cores import LEAST_OTHERS
from gpulab.devices.core_clock import MachineClock
from gpulab.formatting import factor, percent, speedup
from gpulab.options import QUICK_VARIABLE, at_most, is_quick
from gpulab.tuning.compare.statistics import paired

BEGIN = "Write the body of the function in place of the dots, then run that cell and this one again."
QUIETER = (  # what helps an answer that other programs made uncertain
    "If other programs are running, close them; where you cannot, leave them a core (torch.set_num_threads(1), once). "
    "Then run the cell again."
)

Tone = Literal["neutral", "good", "bad"]
State = Literal["unanswered", "wrong", "undecided", "right"]

_COLOURS: dict[Tone, str] = {"neutral": "#5B6B7F", "good": "#1E7B45", "bad": "#B3541E"}
_OPENINGS: dict[State, tuple[str, Tone]] = {
    "unanswered": ("Not answered yet.", "neutral"),
    "wrong": ("Not yet.", "bad"),
    "undecided": ("Undecided.", "neutral"),
    "right": ("Right.", "good"),
}


class Note(Struct, frozen=True):
    """What a lesson says to its reader: an opening and what follows it, in a coloured frame."""

    opening: str
    words: str
    tone: Tone = "neutral"

    def __repr__(self) -> str:
        return f"{self.opening} {self.words}"

    def _repr_html_(self) -> str:
        """Colours that stand on light and dark pages: only the frame and the opening have one of their own."""
        colour = _COLOURS[self.tone]
        frame = f"border-left:4px solid {colour};padding:6px 12px;margin:4px 0;max-width:60em"
        opening = f"background:{colour};color:#FFFFFF;border-radius:3px;padding:1px 7px;margin-right:6px"
        return (
            f'<div style="{frame}"><b style="{opening}">{html.escape(self.opening)}</b>{html.escape(self.words)}</div>'
        )


class Table(Struct, frozen=True):
    """A few lines that a lesson computed, in a type whose letters are equally wide."""

    lines: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join(self.lines)


class Checked(Struct, frozen=True):
    """What came of a check. `hint` says what is missing or wrong, or why the answer is right."""

    state: State
    hint: str
    guess: float | None = None  # the answer and the measurement it was held against, where both are figures
    measured: float | None = None

    def __repr__(self) -> str:
        return repr(self._note)

    def _repr_html_(self) -> str:
        return self._note._repr_html_()

    @property
    def _note(self) -> Note:
        opening, tone = _OPENINGS[self.state]
        return Note(opening, self.hint, tone)


def unanswered(hint: str) -> Checked:
    """The reader has not begun."""
    return Checked("unanswered", hint)


def wrong(hint: str) -> Checked:
    """Something is wrong, and this is what."""
    return Checked("wrong", hint)


def undecided(words: str) -> Checked:
    """What was measured tells neither; `words` say what it leaves open."""
    return Checked("undecided", words)


def right(words: str) -> Checked:
    """The learner solved it; `words` say what was right."""
    return Checked("right", words)


Exercise = Callable[..., Checked]


class NoAnswer(Exception):
    """Raised by a check: what the answer defines still has dots in place of a body."""


def exercise(begin: str = BEGIN, given: tuple[Any, ...] | None = None) -> Callable[[Exercise], Exercise]:
    """A check that says `begin` to `...`, to a function that gives None for `given`, and where it raises NoAnswer."""

    def decorator(check: Exercise) -> Exercise:
        @wraps(check)
        def judge(answer: Any, *others: Any) -> Checked:
            if is_unanswered(answer) or (given is not None and answer(*given) is None):
                return unanswered(begin)
            try:
                return check(answer, *others)
            except NoAnswer:
                return unanswered(begin)

        return judge

    return decorator


def is_unanswered(answer: object) -> bool:
    """Whether an answer is still the `...` of the notebook."""
    return answer is ... or answer is None


PAIRS = 7
BUDGET_S = 25.0
QUICK_PAIRS = 2  # an interval needs as many
FEWEST_PAIRS = 3  # however long one takes: fewer have no interval worth the name
_SHORTEST_S = 0.5  # of a reading of the cores: the system counts in hundredths of a second

Measure = Callable[[], float]  # runs some work once; seconds, of a step or of the whole


class Speed(Struct, frozen=True):
    """The speedup of the second over the first, and its 95 % interval; seconds of each are medians.

    `others_fraction`: the share of the usable cores that other programs took meanwhile; None: not measurable.
    """

    times: float
    interval: tuple[float, float]
    before_s: float
    after_s: float
    count: int
    others_fraction: float | None = None

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs took enough of the cores to make the answer look slow."""
        return self.others_fraction is not None and self.others_fraction >= LEAST_OTHERS

    @property
    def words(self) -> str:
        """ "Speedup 2.1× (2.0–2.3)"."""
        return speedup(self.times, self.interval, ("Speedup {}", "{} slower"))


def seconds_of(work: Callable[[], object]) -> Measure:
    """A measure of a function without arguments: how long one call takes. Waits for the GPU where there is one."""

    def measured() -> float:
        wait_for_gpu()
        began = time.perf_counter()
        work()
        wait_for_gpu()
        return time.perf_counter() - began

    return measured


def time_pairs(before: Measure, after: Measure, *, pairs: int = PAIRS, budget_s: float = BUDGET_S) -> Speed:
    """Both once for warming up, then in turn, each pair in random order, until `pairs` or `budget_s` are reached.

    What either raises passes. definitions.md, "Honest comparison" 3 and 4.
    """
    pairs, deadline = at_most(pairs, QUICK_PAIRS), time.monotonic() + budget_s
    if not is_quick():
        before(), after()
    others = _Others()
    shuffle = random.Random(0)
    seconds: list[tuple[float, float]] = []
    while len(seconds) < pairs and (len(seconds) < FEWEST_PAIRS or time.monotonic() < deadline):
        gc.collect()
        if shuffle.random() < 0.5:
            first = before()
            seconds.append((first, after()))
        else:
            second = after()
            seconds.append((before(), second))
    others_fraction = others.fraction()
    a, b = np.array(seconds).T
    estimate = paired(a / b)
    assert estimate is not None and estimate.interval is not None  # there are two
    before_s, after_s = float(np.median(a)), float(np.median(b))
    return Speed(estimate.ratio, estimate.interval, before_s, after_s, estimate.count, others_fraction)


def judge_speed(speed: Speed, wanted: float, *, good: str = "", hint: str = "") -> Checked:
    """Right where the whole interval reaches `wanted` times, wrong where none of it does; `hint`: what to try then.

    Where other programs took cores meanwhile, or while it is quick, none is wrong.
    """
    low, high = speed.interval
    if low >= wanted:
        return right(f"{speed.words}. {good}".strip())
    if is_quick():
        return undecided(f"{speed.words}: {QUICK_VARIABLE} is set, and so little is measured that no answer is slow.")
    if high < wanted and not speed.is_disturbed:
        return wrong(f"{speed.words}; the goal is {factor(wanted)}×. {hint}".strip())
    if high < wanted:
        return undecided(
            f"{speed.words}; the goal is {factor(wanted)}×. But other programs took "
            f"{percent(speed.others_fraction or 0.0)} of the CPU meanwhile, and may be the cause. {QUIETER} "
            f"{hint}".strip()
        )
    return undecided(
        f"{speed.words}; the goal is {factor(wanted)}×: the measurement leaves open whether it is reached. {QUIETER}"
    )


class _Others:
    """What other programs take of the cores from here on."""

    def __init__(self) -> None:
        self._clock = MachineClock()
        self._began_s, self._began = time.monotonic(), self._clock.read()

    def fraction(self) -> float | None:
        """Of the usable cores, until now; None: not measurable."""
        passed_s, now = time.monotonic() - self._began_s, self._clock.read()
        if min(now.others_cpu_ns, self._began.others_cpu_ns) == -1 or passed_s < _SHORTEST_S:
            return None
        cores = len(os.sched_getaffinity(0))
        return max(0.0, (now.others_cpu_ns - self._began.others_cpu_ns) / 1e9 / passed_s / cores)


def wait_for_gpu() -> None:
    """Until it has done all that was launched; where there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
