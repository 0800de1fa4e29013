"""The check of an exercise: unanswered, not yet right with a hint, or right.

A check never raises for what a reader answers and never stops "Run All". Speed is judged by ratios against what the
same machine measured a moment before, never by absolute times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpulab.lessons.shown import Note, Tone

State = Literal["unanswered", "wrong", "right"]

_OPENINGS: dict[State, tuple[str, Tone]] = {
    "unanswered": ("Not answered yet.", "neutral"),
    "wrong": ("Not yet.", "bad"),
    "right": ("Right.", "good"),
}


@dataclass(frozen=True, slots=True, repr=False)
class Checked:
    """What came of a check. `hint` says what is missing or wrong, or why the answer is right."""

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
    """The reader has not begun."""
    return Checked("unanswered", hint)


def wrong(hint: str) -> Checked:
    """Something is wrong, and this is what."""
    return Checked("wrong", hint)


def right(words: str) -> Checked:
    """It is solved."""
    return Checked("right", words)


def is_unanswered(answer: object) -> bool:
    """Whether an answer is still the `...` of the notebook."""
    return answer is ... or answer is None
