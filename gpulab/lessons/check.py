"""The check of an exercise: unanswered, not yet right with a hint, undecided by what was measured, or right.

A check never raises for what a reader answers and never stops "Run All". Speed is judged by ratios against what the
same machine measured a moment before, never by absolute times.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

from msgspec import Struct

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
