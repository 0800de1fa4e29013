"""The quick start has two guesses and no exercise."""

from __future__ import annotations

from collections.abc import Mapping

from gpulab.lessons.guesses import Question, share, times
from gpulab.lessons.measured import data_wait_share, latest_facts

QUESTIONS: Mapping[str, Question] = {
    "waiting": share(
        "What share of each step waits for data?",
        lambda: data_wait_share(latest_facts("quick-start")),
        "of each step waits for data",
    ),
    "workers": times("What speedup do two workers give?", "two-workers", "with two workers"),
}
