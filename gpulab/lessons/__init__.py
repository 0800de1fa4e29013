"""The guided lessons: guesses and their grades, checks with hints, generated data, and the learner's progress.

A notebook begins with `open_lesson`. Each lesson has a module with its data, questions and exercises: a dataset is in a
module, not in a cell, so that DataLoader workers can import it however they are started. Modules are imported on first
use, because the command line and the board of a class need only the catalogue.
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
