"""Guess first, then measure: the questions of a lesson, and how close a guess was.

The field for a guess is plain HTML, which stays readable in a saved notebook; an invisible widget makes it interactive.
A visible widget would be an error message in a notebook that is saved and opened again.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from contextlib import suppress
from html import escape
from typing import Any, Literal

from msgspec import Struct

from gpulab.formatting import factor, percent, speedup
from gpulab.lessons.check import QUIETER, Note, NotMeasured, is_unanswered
from gpulab.lessons.measured import Faster, faster_than, times_faster
from gpulab.views.widgets import close, hidden_widget, in_notebook

Closeness = Literal["exact", "close", "near", "far", "no guess", "undecided", "not measured"]
Unit = Literal["%", "times"]
Manner = tuple[str, str]  # how a factor is worded, from 1 on and below; formatting.speedup

SPEEDUP: Manner = ("speedup {}", "{} slower")
CHEAPER: Manner = ("{} cheaper", "{} more expensive")


class Grade(Struct, frozen=True):
    """How far off a guess may be: in percentage points, or times too large or too small."""

    closeness: Closeness
    opening: str
    points: float
    times: float


GRADES = (  # "exact": guess and measurement are equal as displayed
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
    """A question for a guess, and how to measure the answer. `what` follows the figure: "of each step waits for data".

    `experiment` and `setting` say which comparison measures a factor, if any.
    """

    text: str
    unit: Unit
    measure: Callable[[], float | Faster | None]  # a share from 0 to 1, or a factor; None: not known
    what: str
    manner: Manner = SPEEDUP
    experiment: str = ""
    setting: tuple[str, str] = ("", "")

    @property
    def sign(self) -> str:
        """The unit after a guess."""
        return " %" if self.unit == "%" else "×"


def share(text: str, measure: Callable[[], float | None], what: str) -> Question:
    """A question for a share in per cent."""
    return Question(text, "%", measure, what)


def times(
    text: str, experiment: str, what: str, manner: Manner = SPEEDUP, setting: tuple[str, str] = ("", "")
) -> Question:
    """A question for the speedup in the experiment of that name, or of one of its settings."""
    return Question(text, "times", lambda: times_faster(experiment, *setting), what, manner, experiment, setting)


def times_between(text: str, before: str, after: str, what: str) -> Question:
    """A question for the speedup per step of the run named `after` over the run named `before`."""
    return Question(text, "times", lambda: faster_than(before, after), what)


class Revealed(Struct, frozen=True):
    """A guess and its measurement, both in per cent or both factors; None if missing."""

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
    """Measure, and compare the guess with it, unless the measured factor may be chance.

    `shipped`: the measurement of a quiet machine, shown if this machine's is undecided.
    """
    measured = None
    with suppress(NotMeasured):
        measured = question.measure()
    if measured is None:
        return Revealed("not measured", f"There is no figure yet {question.what}. Run the cell that measures it first.")
    value = getattr(guess, "value", guess)
    number = _number(value)
    guessed = "" if number is None else f"Your guess was {number:g}{question.sign}."
    if isinstance(measured, Faster):
        words = (
            f"{speedup(measured.times, measured.interval if measured.sure else None, question.manner)} {question.what}"
        )
        if not measured.sure:
            quiet = f"On a quiet machine it was: {shipped}." if shipped else QUIETER
            return Revealed("undecided", f"Here, {words} may be chance. {quiet} {guessed}".strip(), number)
        figure, example = measured.times, "1.5, for one and a half times"
        number = None if number is not None and number <= 0 else number
    else:
        words, figure, example = f"{percent(measured)} {question.what}", 100 * measured, "40, for 40 %"
    words = f"Measured: {words}."
    if number is None:
        doubt = "" if is_unanswered(value) else f" Your guess, {value!r}, is not a number: write for example {example}."
        return Revealed("no guess", words + doubt, None, figure)
    if isinstance(measured, Faster):
        exact, ratio = factor(number) == factor(figure), max(number / figure, figure / number)
        near = next(grade.closeness for grade in GRADES if ratio <= grade.times)
    else:
        exact, points = percent(number / 100) == percent(measured), abs(number - figure)
        near = next(grade.closeness for grade in GRADES if points <= grade.points)
    return Revealed("exact" if exact else near, f"{words} {guessed}", number, figure)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


_FIELD = (
    "display:none;font:inherit;font-size:13px;width:6em;padding:3px 6px;margin:0 6px 0 0;border-radius:4px;"
    "color:inherit;background:rgba(128,128,128,0.12);border:1px solid rgba(128,128,128,0.5)"
)
_EXAMPLES = {"%": "40", "times": "1.5"}


class GuessInput:
    """The field that `lesson.guess(...)` returns: `value` is the number that was typed, None before that."""

    def __init__(self, name: str, question: Question) -> None:
        self.name = name  # of the variable with the field
        self.question = question
        self.value: float | None = None
        self._key = uuid.uuid4().hex
        self._widget: Any = None

    def __repr__(self) -> str:
        if self.value is not None:
            return f"Your guess: {self.value:g}{self.question.sign}."
        return f"{self.question.text} Guess a number: {self._assignment}"

    @property
    def _assignment(self) -> str:
        return f"{self.name} = {_EXAMPLES[self.question.unit]}"

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        self._enliven()
        return {"text/plain": repr(self), "text/html": self.html()}

    def html(self) -> str:
        """The output; a front end without the widget shows only the words."""
        unit = self.question.sign.strip()
        spoken = "in per cent" if unit == "%" else "as a factor"
        value = "" if self.value is None else f"{self.value:g}"
        # no name, no form: JupyterLab keeps <input> only in what it trusts, and then the words say how to answer
        field = (
            f'<input type="number" step="any" aria-label="Your guess, {spoken}" value="{value}" style="{_FIELD}">'
            f'<span style="display:none;margin-right:8px">{unit}, then Enter,</span>'
        )
        words = f'<span style="font-size:13px;opacity:0.8">or write <code>{escape(self._assignment)}</code></span>'
        question = f"<div><b>Your guess.</b> {escape(self.question.text)}</div>"
        return f'<div class="gpulab-guess-{self._key}" style="margin:4px 0">{question}{field}{words}</div>'

    def _enliven(self) -> None:
        """In a notebook: create the widget that shows the field and sends the input."""
        if self._widget is None and in_notebook():
            self._widget = hidden_widget("guess_input.js")(key=self._key)
            self._widget.on_msg(self._receive)

    def _receive(self, _widget: object, content: dict[str, object], _buffers: object) -> None:
        if content.get("kind") != "guess":
            return
        try:
            value = float(str(content.get("value")))
        except ValueError:
            return
        if math.isfinite(value):
            self.value = value

    def close(self) -> None:
        """The field disappears; the words stay."""
        widget, self._widget = self._widget, None
        if widget is not None:
            widget.over = True
            close(widget)
