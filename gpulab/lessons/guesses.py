"""Guess first, measure then: what a lesson asks, and how close a guess was. Nobody is wrong here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from gpulab.formatting import factor, percent
from gpulab.lessons.check import Note, is_unanswered
from gpulab.lessons.measured import Faster, faster_than, times_faster

CLOSE_POINTS, NEAR_POINTS = 6.0, 15.0  # percentage points
CLOSE_TIMES, NEAR_TIMES = 1.15, 1.6  # how many times too large or too small

Closeness = Literal["close", "near", "far", "no guess", "undecided", "not measured"]
Unit = Literal["%", "times"]

_OPENINGS: dict[Closeness, str] = {
    "close": "Close.",
    "near": "Not far off.",
    "far": "A surprise.",
    "no guess": "No guess.",
    "undecided": "Undecided.",
    "not measured": "Not measurable.",
}


class Question(Struct, frozen=True):
    """What a learner guesses, and how it is measured. `what` follows the figure: "of each step waits for data".

    `manner` is what a factor says of it: "2.1 times as fast", or "as cheap".
    """

    text: str
    unit: Unit
    measure: Callable[[], float | Faster | None]  # a share from 0 to 1, or a factor; None: not measured yet
    what: str
    manner: str = "as fast"


def share(text: str, measure: Callable[[], float | None], what: str) -> Question:
    """A question for a share in per cent."""
    return Question(text, "%", measure, what)


def times(
    text: str, experiment: str, what: str, manner: str = "as fast", setting: tuple[str, str] = ("", "")
) -> Question:
    """A question for how many times as fast the experiment of that name makes the cell, or that setting of it."""
    return Question(text, "times", lambda: times_faster(experiment, *setting), what, manner)


def times_between(text: str, before: str, after: str, what: str) -> Question:
    """A question for how many times as fast the run named `after` is as the one named `before`, step by step."""
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


def reveal(guess: object, question: Question) -> Revealed:
    """Measure, and hold the guess against it. A factor that may be chance is not held against anybody."""
    measured = question.measure()
    if measured is None:
        return Revealed("not measured", f"There is no figure yet {question.what}. Run the cell that measures it first.")
    if isinstance(measured, Faster):
        return _times(guess, measured, f"{question.manner} {question.what}")
    return _share(guess, measured, question.what)


def _share(guess: object, measured: float, what: str) -> Revealed:
    measured_words = f"Measured: {percent(measured)} {what}."
    number = _number(guess)
    if number is None:
        return _without(guess, 100 * measured, measured_words, "40, for 40 %")
    distance = abs(number - 100 * measured)
    near: Closeness = "close" if distance <= CLOSE_POINTS else "near" if distance <= NEAR_POINTS else "far"
    return Revealed(near, f"{measured_words} Your guess was {number:g} %.", number, 100 * measured)


def _times(guess: object, measured: Faster, what: str) -> Revealed:
    if not measured.sure:
        words = (
            f"It was {factor(measured.times)} times {what}, and that may be chance. If other programs are "
            "running, run that cell again when they have ended. What the lesson says below is true of a quiet machine."
        )
        return Revealed("undecided", words, _number(guess))
    measured_words = f"Measured: {factor(measured.times)} times {what}."
    number = _number(guess)
    if number is None or number <= 0:
        return _without(guess, measured.times, measured_words, "1.5, for one and a half times")
    off = max(number / measured.times, measured.times / number)
    near: Closeness = "close" if off <= CLOSE_TIMES else "near" if off <= NEAR_TIMES else "far"
    return Revealed(near, f"{measured_words} Your guess was {number:g}.", number, measured.times)


def _number(guess: object) -> float | None:
    """Of what was assigned, or typed into the field."""
    value = getattr(guess, "value", guess)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _without(guess: object, measured: float, measured_words: str, example: str) -> Revealed:
    value = getattr(guess, "value", guess)
    if is_unanswered(value):
        words = f"{measured_words} A figure stays in mind when it was guessed before."
        return Revealed("no guess", words, None, measured)
    words = f"{measured_words} Your guess, {value!r}, is not a number: write for example {example}."
    return Revealed("no guess", words, None, measured)
