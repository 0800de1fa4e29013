"""The speed of an answer: decided by its interval, never by one lucky measurement."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.devices.core_clock import MachineReading
from gpulab.lessons.check import Speed, judge_speed, seconds_of, time_pairs


class Cores:
    """A clock of the cores on which other programs take `others_s` from each reading to the next; None: unknown."""

    def __init__(self, others_s: float | None) -> None:
        self.others_s = others_s
        self.readings = 0

    def read(self) -> MachineReading:
        self.readings += 1
        others_ns = -1 if self.others_s is None else int(self.readings * self.others_s * 1e9)
        return MachineReading(0, others_ns, 0, 0, 0, 0, 0, 0)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulab.lessons.check.MachineClock", lambda: Cores(0.0))


def scripted(*seconds: float) -> Callable[[], float]:
    return itertools.cycle(seconds).__next__


def test_twice_as_fast_is_twice_as_fast() -> None:
    speed = time_pairs(scripted(0.2), scripted(0.1))
    assert speed.times == pytest.approx(2) and speed.interval == pytest.approx((2, 2)) and speed.count == 7
    assert judge_speed(speed, 1.5, good="So it is.").state == "right"
    assert judge_speed(speed, 3, hint="Try more.").hint.endswith("the goal is 3.0×. Try more.")


def test_what_other_programs_slow_down_is_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulab.lessons.check.MachineClock", lambda: Cores(1000.0))
    monkeypatch.setattr("gpulab.lessons.check.LEAST_OTHERS", 0.15)
    monkeypatch.setattr("gpulab.lessons.check._SHORTEST_S", 0.0)
    speed = time_pairs(scripted(0.2), scripted(0.1))
    assert (speed.others_fraction or 0.0) >= 0.15 and judge_speed(speed, 1.5).state == "right"
    slow = judge_speed(replace(speed, others_fraction=0.62), 3, hint="Try more.")
    assert slow.state == "undecided"
    assert "other programs took 62 % of the CPU" in slow.hint and slow.hint.endswith("Try more.")


@pytest.mark.parametrize("others_s", [0.0, None])
def test_without_other_programs_slow_is_wrong(monkeypatch: pytest.MonkeyPatch, others_s: float | None) -> None:
    monkeypatch.setattr("gpulab.lessons.check.MachineClock", lambda: Cores(others_s))
    monkeypatch.setattr("gpulab.lessons.check._SHORTEST_S", 0.0)
    speed = time_pairs(scripted(0.2), scripted(0.1))
    assert speed.others_fraction == others_s and judge_speed(speed, 3).state == "wrong"


def test_a_lucky_answer_that_does_nothing_is_not_right() -> None:
    lucky = time_pairs(scripted(1.0, 3.0, 1.0, 9.0, 1.0), scripted(1.0, 1.0, 2.0))
    assert judge_speed(lucky, 1.5).state == "undecided"


@given(st.floats(0.1, 10), st.floats(1, 5), st.floats(0.2, 8))
def test_a_verdict_agrees_with_the_interval(times: float, spread: float, expected: float) -> None:
    speed = Speed(times, (times / spread, times * spread), 1.0, 1.0 / times, 5)
    state = judge_speed(speed, expected).state
    assert (state == "right") == (times / spread >= expected)
    assert (state == "wrong") == (times * spread < expected)


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
