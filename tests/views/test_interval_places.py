"""Axes of factors: every factor inside, 1 always among the numbers, no number over another or over an end."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulab.views.interval_places import axis_of, factor_ticks, labels

FACTORS = st.lists(st.floats(0.01, 100), max_size=6)


@given(FACTORS)
def test_every_factor_and_1_stand_inside(factors: list[float]) -> None:
    axis = axis_of(factors)
    assert all(0 < axis.place(factor) < 1 for factor in (1.0, *factors))


@given(FACTORS)
def test_numbers_stand_apart_and_inside_and_1_among_them(factors: list[float]) -> None:
    shown = labels(axis_of(factors))
    assert "1" in [label.words for label in shown]
    assert all(-1e-9 <= label.left < label.right <= 1 + 1e-9 for label in shown)
    assert all(a.right <= b.left + 1e-9 for a, b in pairwise(shown))


def test_twice_is_as_far_from_1_as_half() -> None:
    axis = axis_of([0.25, 4.0])
    assert axis.place(2.0) - axis.place(1.0) == pytest.approx(axis.place(1.0) - axis.place(0.5))
    assert axis.place(1.0) == pytest.approx(0.5)


def test_ticks_are_round_and_inside() -> None:
    assert factor_ticks(0.04, 6.0) == [0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
    assert factor_ticks(0.97, 1.04) == [0.98, 1.0, 1.02, 1.04]
    assert factor_ticks(0.7, 4.0) == [1.0, 2.0, 3.0, 4.0]
    assert factor_ticks(0.01, 50.0) == [0.01, 0.1, 1.0, 10.0]
