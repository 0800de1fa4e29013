"""The guided lessons: guesses and how close they were, checks that give hints, made data, and the learner's progress.

`open_lesson` is what a notebook begins with. Each lesson's data, questions and exercises have a module of their own: a
dataset lives there and not in a cell, so that DataLoader workers can import it however they are started.
"""

from __future__ import annotations

from gpulab.lessons.check import Checked, is_unanswered, right, unanswered, undecided, wrong
from gpulab.lessons.lesson import Lesson, open_lesson
from gpulab.lessons.measured import check_enough, times_faster, working_shares

__all__ = [
    "Checked",
    "Lesson",
    "check_enough",
    "is_unanswered",
    "open_lesson",
    "right",
    "times_faster",
    "unanswered",
    "undecided",
    "working_shares",
    "wrong",
]
