"""Guess first, measure then: tells a reader how close a guess was. Nobody is wrong here, so there is no verdict."""

from __future__ import annotations

import math

from gpulab.formatting import factor, percent
from gpulab.lessons.check import Note, is_unanswered
from gpulab.lessons.measured import Faster

CLOSE_POINTS, NEAR_POINTS = 8.0, 25.0  # percentage points
CLOSE_TIMES, NEAR_TIMES = 1.15, 1.6  # how many times too large or too small


def told_share(guess: object, measured: float | None, what: str) -> Note:
    """`guess` in per cent against a measured share, 0 to 1. `what` it is: "of each step waits for data"."""
    if measured is None:
        return _not_measurable(what)
    measured_words = f"Measured: {percent(measured)} {what}."
    number = _number(guess)
    if number is None:
        return _no_guess(guess, measured_words, "40, for 40 %")
    distance = abs(number - 100 * measured)
    near = "Close." if distance <= CLOSE_POINTS else "Not far off." if distance <= NEAR_POINTS else "A surprise."
    return Note(near, f"{measured_words} Your guess was {number:g} %.")


def told_times(guess: object, measured: Faster | None, what: str) -> Note:
    """`guess` as a factor against a measured factor. `what` it is: "with two workers" (2.4 times as fast).

    A factor that may be chance is told as such, and no guess is held against it.
    """
    if measured is None:
        return _not_measurable(what)
    if not measured.sure:
        return Note(
            "Undecided.",
            f"It was {factor(measured.times)} times as fast {what}, and that may be chance. If other programs are "
            "running, run that cell again when they have ended.",
        )
    measured_words = f"Measured: {factor(measured.times)} times as fast {what}."
    number = _number(guess)
    if number is None or number <= 0:
        return _no_guess(guess, measured_words, "1.5, for one and a half times")
    off = max(number / measured.times, measured.times / number)
    near = "Close." if off <= CLOSE_TIMES else "Not far off." if off <= NEAR_TIMES else "A surprise."
    return Note(near, f"{measured_words} Your guess was {number:g}.")


def _number(guess: object) -> float | None:
    if isinstance(guess, bool) or not isinstance(guess, (int, float)):
        return None
    return float(guess) if math.isfinite(guess) else None


def _no_guess(guess: object, measured_words: str, example: str) -> Note:
    if is_unanswered(guess):
        return Note("No guess.", f"{measured_words} A figure stays in mind when it was guessed before.")
    return Note("No number.", f"{measured_words} Your guess, {guess!r}, is not a number: write for example {example}.")


def _not_measurable(what: str) -> Note:
    return Note("Not measurable.", f"There is no figure {what}. Did the cell above run to its end?")
