"""The picture of a climb: bars only of what blocks tell, each on top of all that was kept before."""

from __future__ import annotations

import pytest

from gpulab.views.climb.attempts import ladder
from gpulab.views.climb.climb import Climbed
from tests.support.markup import Markup
from tests.views.every_view import a_climb


def test_bars_are_of_blocks_and_begin_at_what_was_kept() -> None:
    bars = [row.bar for row in ladder(a_climb()).rows]
    assert bars == [1.0, 0.0, 0.0, pytest.approx(0.5 * 0.8)]


def test_one_pair_has_no_figure() -> None:
    line = ladder(a_climb()).rows[2].cells
    assert line[1] == "–" and line[-2] == "–" and "undecided" in line[-1]


def test_the_picture_ends_in_all_that_was_kept() -> None:
    read = Markup(Climbed(a_climb())._picture())
    assert "All together, at the end: knob_1=on, knob_3=on" in read.words
    assert "37.9 → 13.0 ms a step · 2.91 times as fast (2.87–2.92)" in read.words
    assert not read.caught and "–" not in read.words
