"""The guided lessons: guesses and how close they were, checks that give hints, made data, and the learner's progress.

`open_lesson` is what a notebook begins with. Each lesson's data, questions and exercises have a module of their own: a
dataset lives there and not in a cell, so that DataLoader workers can import it however they are started. Everything is
imported when it is first used: the command line and the board of a class need only the catalogue.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpulab.lessons.lesson import Lesson, open_lesson
    from gpulab.lessons.measured import compare_each, working_shares

__all__ = ["Lesson", "compare_each", "open_lesson", "working_shares"]

_MODULES = {"Lesson": "lesson", "compare_each": "measured", "open_lesson": "lesson", "working_shares": "measured"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
