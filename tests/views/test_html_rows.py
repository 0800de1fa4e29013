"""Rows of a picture as HTML: what is drawn stays on its track, and no word stands where it could be cut off."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpulab.views.html_rows import FactorRange, Piece, factor_axis, factor_row, layers, row
from gpulab.views.interval_places import axis_of
from tests.support.markup import Markup

RANGES = st.builds(
    lambda middle, spread, floor, points, predicted: FactorRange(
        middle, (middle / (1 + spread), middle * (1 + spread)), "#1E9E77", floor, tuple(points), predicted
    ),
    st.floats(0.02, 50),
    st.floats(0, 3),
    st.floats(0, 8),
    st.lists(st.floats(0.001, 1000), max_size=12),
    st.none() | st.tuples(st.floats(0.5, 1), st.floats(1, 2)),
)


@given(RANGES)
def test_what_is_drawn_stays_on_its_track(shown: FactorRange) -> None:
    axis = axis_of(shown.factors)
    for layer in layers(axis, shown):
        assert all(0 <= piece.left <= piece.right <= 1 for piece in layer)
        assert all(a.right <= b.left for a, b in pairwise(layer))


@given(RANGES)
def test_the_middle_lies_on_its_interval(shown: FactorRange) -> None:
    *_, (interval,), (middle,) = layers(axis_of(shown.factors), shown)
    assert interval.left - 0.01 <= middle.left and middle.right <= interval.right + 0.01
    assert isinstance(middle, Piece) and middle.colour == interval.colour


def test_points_far_out_are_left_out_and_not_moved() -> None:
    shown = FactorRange(2.0, (1.9, 2.1), "#1E9E77", 0.01, (0.001, 2.0, 500.0))
    _, _, points, _, _, _ = layers(axis_of(shown.factors), shown)
    assert len(points) == 1


def test_no_word_stands_in_a_bar_or_is_cut_off() -> None:
    shown = FactorRange(2.0, (0.4, 9.0), "#1E9E77", 0.4, (1.0, 3.0), (1.5, 3.0))
    axis = axis_of(shown.factors)
    markup = row("a_long_setting_of_a_knob=" + 60 * "9", "2.0× (0.4–9.0×): undecided", factor_row(axis, shown))
    read = Markup(markup + factor_axis(axis))
    assert "1" in read.words and not read.caught
    assert Markup('<div style="overflow:hidden">word</div>').caught, "the reader sees what it looks for"


def test_widths_of_a_layer_add_up_to_at_most_all() -> None:
    shown = FactorRange(2.0, (0.4, 9.0), "#1E9E77", 0.4, (1.0, 3.0), (1.5, 3.0))
    for layer in factor_row(axis_of(shown.factors), shown).split("display:flex")[1:]:
        assert sum(float(width) for width in re.findall(r"width:([\d.]+)%", layer)) <= 100.01
