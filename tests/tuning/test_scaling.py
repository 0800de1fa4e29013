"""The efficiency of more ranks, against the ratio that it stands for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulab.api.ranked_experiment import counts_of
from gpulab.errors import UsageError
from gpulab.tuning.compare.statistics import scaling
from gpulab.views.comparison import ScalingView


@given(st.floats(1.0, 1e6), st.dictionaries(st.sampled_from([2, 4, 8]), st.floats(1.0, 20.0), min_size=1))
def test_efficiency_is_the_step_of_one_over_that_of_many(one_us: float, slower: dict[int, float]) -> None:
    times = {1: [one_us] * 3} | {count: [one_us * factor] * 3 for count, factor in slower.items()}
    points = scaling(times)
    assert [point.ranks for point in points] == sorted(times)
    for point in points:
        expected = 1 / slower.get(point.ranks, 1.0)
        assert point.efficiency == pytest.approx(expected) and point.speedup == pytest.approx(expected * point.ranks)
        assert (point.interval is None) == (point.ranks == 1)
        low, high = point.interval or (expected, expected)
        assert low <= point.efficiency * 1.000001 and high >= point.efficiency * 0.999999


def test_one_round_has_no_interval() -> None:
    first, second = scaling({2: [10.0], 1: [8.0]})
    assert (first.ranks, first.efficiency, first.interval) == (1, 1.0, None)
    assert (second.efficiency, second.speedup, second.interval) == (0.8, 1.6, None)


def test_a_round_that_was_cut_short_has_no_pair() -> None:
    assert [point.efficiency for point in scaling({1: [10.0, 10.0], 2: [20.0]})] == [1.0, 0.5]
    assert [point.ranks for point in scaling({1: [10.0]})] == [1]


def test_a_wide_interval_decides_nothing() -> None:
    view = ScalingView(scaling({1: [10_000.0, 10_000.0], 2: [10_000.0, 20_000.0]}), 2, 2)
    assert view.headline.level == "unknown" and view.headline.sentence.startswith("Undecided: so far 2 ranks give")
    slow = ScalingView(scaling({1: [10_000.0] * 3, 2: [20_000.0] * 3}), 3, 2)
    assert slow.headline.level == "bad" and slow.headline.sentence.startswith("2 ranks give a 1×")


def test_the_headline_says_how_much_more_is_done() -> None:
    view = ScalingView(scaling({1: [10_000.0] * 3, 2: [12_000.0] * 3}), 3, 2)
    assert view.headline.sentence.startswith("2 ranks give a 1.67× speedup over 1: 83 % scaling efficiency")
    assert "12.0 ms with 2" in view.headline.evidence and view.headline.level == "good"
    assert "CPU core" not in view.text() and "share 2 CPU cores" in ScalingView(
        scaling({1: [1.0], 4: [4.0]}), 1, 2
    ).text(full=True)
    assert ScalingView((), 0, 2, True).headline.level == "unknown"
    assert view.json()["rounds"] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ranks=1"], "two or more integers"),
        (["ranks=1,0"], "two or more integers"),
        (["ranks=1,x"], "two or more integers"),
        (["ranks=2,2"], "appears twice"),
        (["ranks=1,2", "workers=1,2"], "cannot be combined"),
    ],
)
def test_numbers_of_ranks_that_cannot_be(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        counts_of(words)


def test_numbers_of_ranks_are_run_in_order() -> None:
    assert counts_of(["ranks=4,1,2"]) == (1, 2, 4) and counts_of(["workers=1,2"]) is None
