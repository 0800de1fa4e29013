"""Guess first, measure then: what a lesson asks, and how close a guess was. Nobody is wrong here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from gpulab.formatting import factor, percent, speedup
from gpulab.lessons.check import QUIETER, Note, is_unanswered
from gpulab.lessons.measured import Faster, faster_than, times_faster

Closeness = Literal["exact", "close", "near", "far", "no guess", "undecided", "not measured"]
Unit = Literal["%", "times"]
Manner = tuple[str, str]  # how a factor is said, from 1 on and below; formatting.speedup

SPEEDUP: Manner = ("speedup {}", "{} slower")
CHEAPER: Manner = ("{} cheaper", "{} more expensive")


class Grade(Struct, frozen=True):
    """How far off a guess may be: in percentage points, or times too large or too small."""

    closeness: Closeness
    opening: str
    points: float
    times: float


GRADES = (  # a guess that is written like the measurement is exact, however both go on
    Grade("exact", "Exactly.", 0.0, 1.0),
    Grade("close", "Close.", 6.0, 1.15),
    Grade("near", "Not far off.", 15.0, 1.6),
    Grade("far", "A surprise.", math.inf, math.inf),
)
_OPENINGS: dict[Closeness, str] = {
    **{grade.closeness: grade.opening for grade in GRADES},
    "no guess": "No guess.",
    "undecided": "Undecided.",
    "not measured": "Not measurable.",
}


class Question(Struct, frozen=True):
    """What a learner guesses, and how it is measured. `what` follows the figure: "of each step waits for data".

    `experiment` and `setting` say which comparison measures a factor, where one does.
    """

    text: str
    unit: Unit
    measure: Callable[[], float | Faster | None]  # a share from 0 to 1, or a factor; None: not measured yet
    what: str
    manner: Manner = SPEEDUP
    experiment: str = ""
    setting: tuple[str, str] = ("", "")


def share(text: str, measure: Callable[[], float | None], what: str) -> Question:
    """A question for a share in per cent."""
    return Question(text, "%", measure, what)


def times(
    text: str, experiment: str, what: str, manner: Manner = SPEEDUP, setting: tuple[str, str] = ("", "")
) -> Question:
    """A question for the speedup that the experiment of that name measures, or that setting of it."""
    return Question(text, "times", lambda: times_faster(experiment, *setting), what, manner, experiment, setting)


def times_between(text: str, before: str, after: str, what: str) -> Question:
    """A question for the speedup of the run named `after` over the one named `before`, step by step."""
    return Question(text, "times", lambda: faster_than(before, after), what)


class Revealed(Struct, frozen=True):
    """A guess beside its measurement; both in per cent or both as a factor. None where there is none."""

    closeness: Closeness
    words: str
    guess: float | None = None
    measured: float | None = None

    def __repr__(self) -> str:
        return repr(self.note)

    def _repr_html_(self) -> str:
        return self.note._repr_html_()

    @property
    def note(self) -> Note:
        return Note(_OPENINGS[self.closeness], self.words)


def reveal(guess: object, question: Question, shipped: str = "") -> Revealed:
    """Measure, and hold the guess against it. A factor that may be chance is not held against anybody.

    `shipped`: what was measured on a quiet machine, for who cannot measure it here.
    """
    measured = question.measure()
    if measured is None:
        return Revealed("not measured", f"There is no figure yet {question.what}. Run the cell that measures it first.")
    if isinstance(measured, Faster):
        return _times(guess, measured, question, shipped)
    return _share(guess, measured, question.what)


def _share(guess: object, measured: float, what: str) -> Revealed:
    measured_words = f"Measured: {percent(measured)} {what}."
    number = _number(guess)
    if number is None:
        return _without(guess, 100 * measured, measured_words, "40, for 40 %")
    exact = percent(number / 100) == percent(measured)
    off = abs(number - 100 * measured)
    near: Closeness = "exact" if exact else next(g.closeness for g in GRADES if off <= g.points)
    return Revealed(near, f"{measured_words} Your guess was {number:g} %.", number, 100 * measured)


def _times(guess: object, measured: Faster, question: Question, shipped: str) -> Revealed:
    number = _number(guess)
    interval = measured.interval if measured.sure else None
    words = f"{speedup(measured.times, interval, question.manner)} {question.what}"
    guessed = f"Your guess was {number:g}×." if number is not None else ""
    if not measured.sure:
        quiet = f"On a quiet machine it was: {shipped}." if shipped else QUIETER
        return Revealed("undecided", f"Here, {words} may be chance. {quiet} {guessed}".strip(), number)
    measured_words = f"Measured: {words}."
    if number is None or number <= 0:
        return _without(guess, measured.times, measured_words, "1.5, for one and a half times")
    exact = factor(number) == factor(measured.times)
    off = max(number / measured.times, measured.times / number)
    near: Closeness = "exact" if exact else next(g.closeness for g in GRADES if off <= g.times)
    return Revealed(near, f"{measured_words} {guessed}", number, measured.times)


def _number(guess: object) -> float | None:
    """Of what was assigned, or typed into the field."""
    value = getattr(guess, "value", guess)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _without(guess: object, measured: float, measured_words: str, example: str) -> Revealed:
    value = getattr(guess, "value", guess)
    if is_unanswered(value):
        return Revealed("no guess", measured_words, None, measured)
    words = f"{measured_words} Your guess, {value!r}, is not a number: write for example {example}."
    return Revealed("no guess", words, None, measured)
