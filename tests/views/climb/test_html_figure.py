"""The picture of a climb: bars only of what blocks tell, each on top of all that was kept before."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpulab.tuning.climb.record import Attempt, Climb
from gpulab.tuning.record import Comparison
from gpulab.views.climb.attempts import ladder
from gpulab.views.climb.climb import Climbed
from tests.support import comparisons as made
from tests.support.scripted_climb import finding
from tests.views.test_html_rows import WordsInBoxes


def attempt(number: int, comparison: Comparison, *, kept: bool) -> Attempt:
    settings = {f"knob_{number}": "on"}
    words = "faster, and the loss is the same" if kept else "undecided"
    outcome = "kept" if kept else "unsure"
    return Attempt(number, settings, finding("data_wait"), None, outcome, words, comparison)  # type: ignore[arg-type]


def climb() -> Climb:
    """The first try was kept by whole runs, the second has one pair, the third is a fifth faster than the first."""
    whole = made.a_comparison()
    by_runs = replace(whole, evidence="sequential", ratio=0.5)
    one_pair = replace(whole, ratio=1.3, interval=None, pairs=1)
    in_blocks = replace(whole, ratio=0.8, interval=(0.75, 0.85))
    rungs = (
        attempt(1, by_runs, kept=True),
        attempt(2, one_pair, kept=False),
        attempt(3, in_blocks, kept=True),
    )
    return Climb(made.as_written(), rungs, "budget", 30.0, whole=whole)


def test_bars_are_of_blocks_and_begin_at_what_was_kept() -> None:
    bars = [row.bar for row in ladder(climb()).rows]
    assert bars == [1.0, 0.0, 0.0, pytest.approx(0.5 * 0.8)]


def test_one_pair_has_no_figure() -> None:
    line = ladder(climb()).rows[2].cells
    assert line[1] == "–" and line[-2] == "–" and "undecided" in line[-1]


def test_the_picture_ends_in_all_that_was_kept() -> None:
    read = WordsInBoxes(Climbed(climb())._picture())
    assert "All together, at the end: knob_1=on, knob_3=on" in read.words
    assert "37.9 → 13.0 ms a step · 2.91 times as fast (2.87–2.92)" in read.words
    assert not read.caught and "–" not in read.words


def test_a_notebook_gets_the_ladder_once() -> None:
    view = Climbed(climb())
    assert view.bundle().keys() == {"text/html", "text/plain"} and "<img" not in view.html()
    before, _, after = view.fragment().partition("<details")
    assert "The ladder" not in before and "The ladder" in after and "THE LADDER" in view.text()
