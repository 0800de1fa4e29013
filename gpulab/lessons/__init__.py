"""The guided lessons: guesses and how close they were, checks that give hints, made data, and the learner's progress.

`open_lesson` is what a notebook begins with. Each lesson's data, questions and exercises have a module of their own: a
dataset lives there and not in a cell, so that DataLoader workers can import it however they are started. Everything is
imported when it is first used: the command line and the board of a class need only the catalogue.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpulab.lessons.check import Checked, is_unanswered, right, unanswered, undecided, wrong
    from gpulab.lessons.lesson import Lesson, open_lesson
    from gpulab.lessons.measured import check_enough, compare_each, times_faster, working_shares

__all__ = [
    "Checked",
    "Lesson",
    "check_enough",
    "compare_each",
    "is_unanswered",
    "open_lesson",
    "right",
    "times_faster",
    "unanswered",
    "undecided",
    "working_shares",
    "wrong",
]

_MODULES = {
    **dict.fromkeys(("Checked", "is_unanswered", "right", "unanswered", "undecided", "wrong"), "check"),
    **dict.fromkeys(("Lesson", "open_lesson"), "lesson"),
    **dict.fromkeys(("check_enough", "compare_each", "times_faster", "working_shares"), "measured"),
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
