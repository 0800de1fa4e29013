"""What the guided lessons share: guesses and how close they were, checks of exercises that give hints, made data.

`predictions`, `check` and `measured` are for every lesson; its data and its exercise have a module of their own.
A dataset lives there and not in a cell, so that DataLoader workers can import it however they are started.
"""

from __future__ import annotations

from gpulab.lessons.check import Checked, is_unanswered, right, unanswered, undecided, wrong
from gpulab.lessons.measured import check_enough, times_faster
from gpulab.lessons.predictions import told_share, told_times

__all__ = [
    "Checked",
    "check_enough",
    "is_unanswered",
    "right",
    "times_faster",
    "told_share",
    "told_times",
    "unanswered",
    "undecided",
    "wrong",
]
