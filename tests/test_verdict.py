"""The one rule that decides a comparison, for every ratio, interval and floor there may be."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpulab.verdict import EQUIVALENT, LEAST_EFFECT, TOO_FEW, Verdict, is_decided, verdict

LOGS = st.floats(-7.0, 7.0)
FLOORS = st.one_of(st.none(), st.floats(0.0, 50.0))
ENOUGH = 12


@pytest.mark.parametrize(
    ("ratio", "interval", "floor", "said"),
    [
        (0.90, (0.85, 0.95), 0.01, "faster"),
        (1.10, (1.05, 1.15), None, "slower"),
        (0.05, (0.04, 0.07), 6.39, "faster"),  # 639 %: as a symmetric percentage it left room for nothing
        (20.0, (14.0, 25.0), 6.39, "slower"),
        (0.985, (0.98, 0.99), 0.001, "no measurable difference"),  # within 3 %
        (1.0, (0.9, 1.1), 0.01, "undecided"),  # wider than the band
        (0.95, (0.93, 0.97), 0.06, "undecided"),  # beneath the noise floor
        (0.90, (0.79, 1.01), 0.01, "undecided"),
        (1 / 2.14, (1 / 4.94, 1.0), 0.01, "undecided"),
        (0.50, None, 0.01, "undecided"),
        (None, None, None, "not comparable"),
    ],
)
def test_what_is_said(
    ratio: float | None, interval: tuple[float, float] | None, floor: float | None, said: Verdict
) -> None:
    assert verdict(ratio, interval, floor, ENOUGH) == said


@given(LOGS, st.floats(0.0, 3.0), st.floats(0.0, 3.0), FLOORS)
def test_what_lies_wholly_outside_the_band_is_decided(
    middle: float, below: float, above: float, floor: float | None
) -> None:
    band = math.log1p(max(LEAST_EFFECT, floor or 0.0)) + 1e-9
    low, high = middle - below, middle + above
    assume(high < -band or low > band)
    said = verdict(math.exp(middle), (math.exp(low), math.exp(high)), floor, ENOUGH)
    assert said == ("faster" if middle < 0 else "slower")


@given(LOGS, st.floats(0.0, 3.0), st.floats(0.0, 3.0), FLOORS)
def test_half_as_long_and_twice_as_long_are_mirrored(
    middle: float, below: float, above: float, floor: float | None
) -> None:
    mirrored = {"faster": "slower", "slower": "faster"}
    said = verdict(math.exp(middle), (math.exp(middle - below), math.exp(middle + above)), floor, ENOUGH)
    other = verdict(math.exp(-middle), (math.exp(-middle - above), math.exp(-middle + below)), floor, ENOUGH)
    edges = [math.log1p(x) for x in (LEAST_EFFECT, EQUIVALENT, floor or 0.0)]
    assume(all(abs(abs(x) - edge) > 1e-9 for x in (middle, middle - below, middle + above) for edge in edges))
    assert other == mirrored.get(said, said)


@given(LOGS, st.floats(0.0, 3.0), st.floats(0.0, 3.0), FLOORS, st.integers(1, 40))
def test_no_difference_is_said_of_what_excludes_one(
    middle: float, below: float, above: float, floor: float | None, count: int
) -> None:
    interval = math.exp(middle - below), math.exp(middle + above)
    if verdict(math.exp(middle), interval, floor, count) == "no measurable difference":
        assert interval[0] >= 1 / (1 + EQUIVALENT) and interval[1] <= 1 + EQUIVALENT and count >= TOO_FEW


def test_only_an_answer_is_decided() -> None:
    said: tuple[Verdict, ...] = ("faster", "slower", "no measurable difference", "undecided", "not comparable")
    assert [is_decided(one) for one in said] == [True, True, True, False, False]
