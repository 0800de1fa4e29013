"""The speed of an answer: decided by its interval, never by one lucky measurement."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulab.lessons.pairs import Speed, judge_speed, seconds_of, time_pairs


def scripted(*seconds: float) -> Callable[[], float]:
    return itertools.cycle(seconds).__next__


def test_twice_as_fast_is_twice_as_fast() -> None:
    speed = time_pairs(scripted(0.2), scripted(0.1))
    assert speed.times == pytest.approx(2) and speed.interval == pytest.approx((2, 2)) and speed.count == 7
    assert judge_speed(speed, 1.5, good="So it is.").state == "right"
    assert judge_speed(speed, 3, hint="Try more.").hint.endswith("and 3.0 is wanted. Try more.")


def test_a_lucky_answer_that_does_nothing_is_not_right() -> None:
    lucky = time_pairs(scripted(1.0, 3.0, 1.0, 9.0, 1.0), scripted(1.0, 1.0, 2.0))
    assert judge_speed(lucky, 1.5).state == "undecided"


@given(st.floats(0.1, 10), st.floats(1, 5), st.floats(0.2, 8))
def test_a_verdict_agrees_with_the_interval(times: float, spread: float, wanted: float) -> None:
    speed = Speed(times, (times / spread, times * spread), 1.0, 1.0 / times, 5)
    state = judge_speed(speed, wanted).state
    assert (state == "right") == (times / spread >= wanted)
    assert (state == "wrong") == (times * spread < wanted)


def test_a_slow_answer_still_gets_an_interval() -> None:
    calls: list[str] = []

    def slow() -> float:
        calls.append("slow")
        return 1.0

    assert time_pairs(slow, slow, budget_s=0.0).count == 3
    assert len(calls) == 8, "both once before"


def test_what_the_answer_raises_passes() -> None:
    def fails() -> float:
        raise KeyError("labels")

    with pytest.raises(KeyError):
        time_pairs(scripted(1.0), fails)
    assert seconds_of(lambda: None)() >= 0
