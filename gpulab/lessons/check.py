"""The check of an exercise: unanswered, not yet right with a hint, undecided by what was measured, or right.

A check never raises for an answer and never stops "Run All". The result of an answer is compared with a reference; a
table of mistakes has a hint for each. Speed is judged by ratios on the same machine at the same time, never by absolute
times: both sides run in turn, and only the interval decides.
"""

from __future__ import annotations

import dis
import gc
import html
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
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
QUIETER = (  # advice if other programs disturbed a measurement
    "If other programs are running, close them; where you cannot, leave them a core (torch.set_num_threads(1), once). "
    "Then run the cell again."
)

_NOTHING = {"RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"}  # the compiled form of a body of dots

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
    """A message to the learner: an opening word and a text, in a coloured frame."""

    opening: str
    words: str
    tone: Tone = "neutral"

    def __repr__(self) -> str:
        return f"{self.opening} {self.words}"

    def _repr_html_(self) -> str:
        """Readable on light and dark pages: only the frame and the opening are coloured."""
        colour = _COLOURS[self.tone]
        frame = f"border-left:4px solid {colour};padding:6px 12px;margin:4px 0;max-width:60em"
        opening = f"background:{colour};color:#FFFFFF;border-radius:3px;padding:1px 7px;margin-right:6px"
        return (
            f'<div style="{frame}"><b style="{opening}">{html.escape(self.opening)}</b>{html.escape(self.words)}</div>'
        )


class Table(Struct, frozen=True):
    """Lines of text that a lesson computed, shown in a monospaced font."""

    lines: tuple[str, ...]

    @classmethod
    def of(cls, head: Sequence[str], rows: Iterable[Sequence[object]], *below: str, gap: str = "  ") -> Table:
        """A table from a header and rows, with numbers right-aligned; `below` are lines after it."""
        columns = [[str(cell) for cell in column] for column in zip(head, *rows, strict=True)]
        for number, column in enumerate(columns):
            width, has_figures = max(map(len, column)), any(cell[:1].isdigit() for cell in column[1:])
            columns[number] = [cell.rjust(width) if has_figures else cell.ljust(width) for cell in column]
        return cls((*(gap.join(cells).rstrip() for cells in zip(*columns, strict=True)), *below))

    def __repr__(self) -> str:
        return "\n".join(self.lines)


class Checked(Struct, frozen=True):
    """The result of a check. `hint` says what is missing or wrong, or why the answer is right."""

    state: State
    hint: str

    def __repr__(self) -> str:
        return repr(self._note)

    def _repr_html_(self) -> str:
        return self._note._repr_html_()

    @property
    def _note(self) -> Note:
        opening, tone = _OPENINGS[self.state]
        return Note(opening, self.hint, tone)


def unanswered(hint: str) -> Checked:
    """The learner has not begun."""
    return Checked("unanswered", hint)


def wrong(hint: str) -> Checked:
    """The answer is wrong; `hint` says why."""
    return Checked("wrong", hint)


def undecided(words: str) -> Checked:
    """The measurement does not decide; `words` say what remains open."""
    return Checked("undecided", words)


def right(words: str) -> Checked:
    """The learner solved it; `words` say what was right."""
    return Checked("right", words)


Exercise = Callable[..., Checked]


class NoAnswer(Exception):
    """Raised by a check if the answer still has dots in it."""


class NotMeasured(Exception):
    """A check, a figure or a question needs a measurement that is missing; the message says what to run."""


def exercise(begin: str = "") -> Callable[[Exercise], Exercise]:
    """Turns `...` and NoAnswer into an unanswered check with the hint `begin`, and NotMeasured into what to run.

    Without `begin`, the answer is a function, which counts as unanswered while its body is dots.
    """

    def decorator(check: Exercise) -> Exercise:
        @wraps(check)
        def judge(answer: Any, *others: Any) -> Checked:
            if is_unanswered(answer):
                return unanswered(begin or BEGIN)
            if not begin and not callable(answer):
                return wrong(f"That is a {type(answer).__name__}; expected a function.")
            if not begin and _is_empty(answer):
                return unanswered(BEGIN)
            try:
                return check(answer, *others)
            except NoAnswer:
                return unanswered(begin or BEGIN)
            except NotMeasured as e:
                return unanswered(str(e))

        return judge

    return decorator


def _is_empty(function: object) -> bool:
    """Whether the function's body is still the dots: it only returns None."""
    code = getattr(function, "__code__", None)
    steps = [] if code is None else list(dis.get_instructions(code))
    constants = [step.argval for step in steps if step.opname in ("LOAD_CONST", "RETURN_CONST")]
    return {step.opname for step in steps} <= _NOTHING and constants[-1:] == [None]


def is_unanswered(answer: object) -> bool:
    """Whether an answer is still the `...` of the notebook."""
    return answer is ... or answer is None


# -- what an answer computes -------------------------------------------------------------------------------------------

Case = tuple[Any, ...]
Mistakes = Sequence[tuple[str, Callable[..., Any]]]  # a hint, and the result of an answer with that mistake


def is_number(value: object) -> bool:
    """Whether the value is a number to compute with; True is not."""
    return (isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0) and not isinstance(value, bool)


def no_number(got: object, _: object) -> str:
    """The hint for a result that is not a number; empty for a number."""
    return "" if is_number(got) else f"It gives {got!r}; expected a number: does the function return its result?"


def is_close(got: Any, expected: Any) -> bool:
    """Whether two numbers are equal up to rounding."""
    return math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-12)


def fault(
    answer: Callable[..., Any],
    expected: Callable[..., Any],
    cases: Sequence[Case],
    mistakes: Mistakes = (),
    *,
    otherwise: str,
    name: str = "",
    form: Callable[[Any, Any], str] = no_number,
    same: Callable[[Any, Any], bool] = is_close,
) -> str:
    """What is wrong with a function, by cases; empty if its results equal those of `expected`.

    For the first wrong case: what `form` says about its result and the right one, else the hint of the mistake that
    explains most of the results, else `otherwise`. With a `name`, the figures of that case precede the hint.
    """
    results = [(case, answer(*case), expected(*case)) for case in cases]
    first = next((one for one in results if form(*one[1:]) or not same(*one[1:])), None)
    if first is None:
        return ""
    case, result, right_one = first
    if words := form(result, right_one):
        return words

    def explained(mistake: Callable[..., Any]) -> int:
        return sum(not form(got, good) and same(got, mistake(*of)) for of, got, good in results)

    possible = [(hint, mistake) for hint, mistake in mistakes if same(result, mistake(*case))]
    hint = max(possible, key=lambda one: explained(one[1]))[0] if possible else otherwise
    return f"{name}{case} gives {result:.6g}; expected {right_one:.6g}. {hint}" if name else hint


# -- how fast it is ----------------------------------------------------------------------------------------------------

PAIRS = 7
BUDGET_S = 25.0
QUICK_PAIRS = 2  # an interval needs as many
FEWEST_PAIRS = 3  # however long one takes: fewer have no useful interval
_SHORTEST_S = 0.5  # of a reading of the cores: the system counts in units of 0.01 s

Measure = Callable[[], float]  # runs some work once; returns seconds, of a step or in total


class Speed(Struct, frozen=True):
    """The speedup of the second function over the first, and its 95 % interval; the seconds of each are medians.

    `others_fraction`: the share of the usable cores that other programs took meanwhile; None: not measurable.
    """

    times: float
    interval: tuple[float, float]
    before_s: float
    after_s: float
    count: int
    others_fraction: float | None = None

    @property
    def words(self) -> str:
        """ "Speedup 2.1× (2.0–2.3)"."""
        return speedup(self.times, self.interval, ("Speedup {}", "{} slower"))


def seconds_of(work: Callable[[], object]) -> Measure:
    """A measure of how long one call of `work` takes, the GPU's work included."""

    def measured() -> float:
        wait_for_gpu()
        began = time.perf_counter()
        work()
        wait_for_gpu()
        return time.perf_counter() - began

    return measured


def wait_for_gpu() -> None:
    """Wait until the GPU, if there is one, has finished all launched work."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_pairs(before: Measure, after: Measure, *, pairs: int = PAIRS, budget_s: float = BUDGET_S) -> Speed:
    """Run both once to warm up, then in pairs of random order, until `pairs` or `budget_s` are reached.

    Exceptions of both functions propagate. definitions.md, "Honest comparison" 3 and 4.
    """
    pairs, deadline = at_most(pairs, QUICK_PAIRS), time.monotonic() + budget_s
    if not is_quick():
        before(), after()
    clock, began_s = MachineClock(), time.monotonic()
    began = clock.read()
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
    passed_s, now, others_fraction = time.monotonic() - began_s, clock.read(), None
    if min(now.others_cpu_ns, began.others_cpu_ns) != -1 and passed_s >= _SHORTEST_S:
        others_s = max(0.0, now.others_cpu_ns - began.others_cpu_ns) / 1e9
        others_fraction = others_s / passed_s / len(os.sched_getaffinity(0))
    a, b = np.array(seconds).T
    estimate = paired(a / b)
    assert estimate is not None and estimate.interval is not None  # there are at least two pairs
    before_s, after_s = float(np.median(a)), float(np.median(b))
    return Speed(estimate.ratio, estimate.interval, before_s, after_s, estimate.count, others_fraction)


def judge_speed(speed: Speed, expected: float, *, good: str = "", hint: str = "") -> Checked:
    """Right if the whole interval reaches `expected` times, wrong if no part of it does; `hint`: what to try then.

    A useless solution that is fast once by chance is undecided or wrong, never right. If other programs took cores, or
    in quick mode, no solution is wrong.
    """
    low, high = speed.interval
    if low >= expected:
        return right(f"{speed.words}. {good}".strip())
    if is_quick():
        return undecided(f"{speed.words}: {QUICK_VARIABLE} is set, and so little is measured that no answer is slow.")
    goal = f"{speed.words}; the goal is {factor(expected)}×"
    if high >= expected:
        return undecided(f"{goal}: the measurement leaves open whether it is reached. {QUIETER}")
    others = speed.others_fraction or 0.0
    if others >= LEAST_OTHERS:
        took = f"But other programs took {percent(others)} of the CPU meanwhile, and may be the cause."
        return undecided(f"{goal}. {took} {QUIETER} {hint}".strip())
    return wrong(f"{goal}. {hint}".strip())


def check_speed(
    before: Callable[[], object],
    after: Callable[[], object],
    expected: float,
    *,
    good: str = "",
    hint: str = "",
    pairs: int = PAIRS,
    budget_s: float = BUDGET_S,
) -> Checked:
    """Whether `after` has a speedup of at least `expected` over `before`, each run in turn."""
    speed = time_pairs(seconds_of(before), seconds_of(after), pairs=pairs, budget_s=budget_s)
    return judge_speed(speed, expected, good=good, hint=hint)
