"""What a running cell can be told about itself: the sentence that its report would begin with, were it over now.

By the rules of the report, so that the live view does not say one thing and the headline another; with the steps that
it is of, for the report is of more.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from gpulab.analysis.facts import facts
from gpulab.diagnosis.catalogue import kind_of
from gpulab.diagnosis.diagnose import diagnose, summary
from gpulab.formatting import decapitalized, plural

if TYPE_CHECKING:
    from gpulab.live_feed import Feed, SoFar

EVERY_S = 3.0


class Sentence:
    """Renewed every few seconds: to find it takes two milliseconds. Nothing here may break the run."""

    def __init__(self) -> None:
        self._words = ""
        self._due_s = 0.0

    def words(self, feed: Feed, elapsed_s: float) -> str:
        """ "So far (40 steps), …"; empty while nothing can be said."""
        if elapsed_s >= self._due_s:
            self._due_s = elapsed_s + EVERY_S
            with suppress(Exception):
                until_now = feed.so_far()
                self._words = self._words if until_now is None else _sentence(until_now)
        return self._words


def _sentence(until_now: SoFar) -> str:
    diagnosis = diagnose(facts(until_now.run), until_now.thresholds)
    first = diagnosis.first
    speaks = not kind_of(first.key).is_verdict or first.level == "good"
    steps = plural(len(until_now.run.steps), "step")
    return f"So far ({steps}), {decapitalized(summary(first, diagnosis))}" if speaks else ""
