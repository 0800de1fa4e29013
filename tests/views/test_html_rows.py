"""Rows of a picture as HTML and their axis: all stays on its track, no word is cut off or stands over another."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulab.views.bars import (
    FactorAxis,
    FactorRange,
    Piece,
    axis_of,
    factor_ticks,
    labels,
    layers,
    stepped_axis,
)
from gpulab.views.page import macros
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
def test_what_is_drawn_stays_on_its_track_and_interval(shown: FactorRange) -> None:
    axis = axis_of(shown.factors)
    drawn = [layer.pieces for layer in layers(axis, shown)]
    for layer in drawn:
        assert all(0 <= piece.left <= piece.right <= 1 for piece in layer)
        assert all(a.right <= b.left for a, b in pairwise(layer))
    *_, (interval,), (middle,) = drawn
    assert interval.left - 0.01 <= middle.left and middle.right <= interval.right + 0.01
    assert isinstance(middle, Piece) and middle.colour == interval.colour
    for row_of_layer in macros("bars.html").factor_row(layers(axis, shown)).split("display:flex")[1:]:
        assert sum(float(width) for width in re.findall(r"width:([\d.]+)%", row_of_layer)) <= 100.01


def test_points_far_out_are_left_out_and_not_moved() -> None:
    shown = FactorRange(2.0, (1.9, 2.1), "#1E9E77", 0.01, (0.001, 2.0, 500.0))
    points = layers(axis_of(shown.factors), shown)[3].pieces
    assert len(points) == 1


def test_no_word_stands_in_a_bar_or_is_cut_off() -> None:
    shown = FactorRange(2.0, (0.4, 9.0), "#1E9E77", 0.4, (1.0, 3.0), (1.5, 3.0))
    axis = axis_of(shown.factors)
    name, figures = "a_long_setting_of_a_knob=" + 60 * "9", "2.0× (0.4–9.0×): undecided"
    markup = macros("bars.html").row(name, figures, macros("bars.html").factor_row(layers(axis, shown)))
    read = Markup(markup + macros("bars.html").factor_axis(labels(axis)))
    assert "1" in read.words and not read.caught
    assert Markup('<div style="overflow:hidden">word</div>').caught, "the reader sees what it looks for"


@given(st.lists(st.floats(0.01, 100), max_size=6))
def test_factors_stand_inside_and_numbers_apart_and_1_among_them(factors: list[float]) -> None:
    axis = axis_of(factors)
    assert all(0 < axis.place(factor) < 1 for factor in (1.0, *factors))
    shown = labels(axis)
    assert "1" in [label.words for label in shown]
    assert all(-1e-9 <= label.left < label.right <= 1 + 1e-9 for label in shown)
    assert all(a.right <= b.left + 1e-9 for a, b in pairwise(shown))


def test_twice_is_as_far_from_1_as_half() -> None:
    axis = axis_of([0.25, 4.0])
    assert axis.place(2.0) - axis.place(1.0) == pytest.approx(axis.place(1.0) - axis.place(0.5))
    assert axis.place(1.0) == pytest.approx(0.5)


@given(st.lists(st.lists(st.floats(0.05, 20), min_size=1, max_size=4), min_size=1, max_size=6))
def test_an_axis_that_is_drawn_again_only_grows_and_in_steps(shown: list[list[float]]) -> None:
    axes: list[FactorAxis] = []
    for factors in shown:
        axes.append(stepped_axis(factors, axes[-1] if axes else None))
        assert all(axes[-1].low < factor < axes[-1].high for factor in (1.0, *factors))
        for end in (axes[-1].low, axes[-1].high):
            assert math.log(end, 1.5) == pytest.approx(round(math.log(end, 1.5)))
    assert all(b.low <= a.low and b.high >= a.high for a, b in pairwise(axes))


def test_ticks_are_round_and_inside() -> None:
    assert factor_ticks(0.04, 6.0) == [0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
    assert factor_ticks(0.97, 1.04) == [0.98, 1.0, 1.02, 1.04]
    assert factor_ticks(0.7, 4.0) == [1.0, 2.0, 3.0, 4.0]
    assert factor_ticks(0.01, 50.0) == [0.01, 0.1, 1.0, 10.0]
