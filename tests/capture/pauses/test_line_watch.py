"""Lines that hold the steps within them, told from hot lines that nearly all looks have met."""

from __future__ import annotations

from gpulab.capture.pauses.line_watch import throughout

FIT, HOT, UPDATE = ("train.py", 9, "main"), ("train.py", 4, "metric"), ("train.py", 6, "main")


def test_a_line_that_takes_nearly_all_the_time_holds_no_step() -> None:
    assert throughout([(HOT,)] * 100, {UPDATE}) == set()


def test_a_line_that_calls_the_update_holds_the_steps() -> None:
    assert throughout([(HOT, FIT)] * 60 + [(FIT,)] * 40, {FIT, UPDATE}) == {FIT}


def test_without_an_update_what_is_always_there_holds_them() -> None:
    assert throughout([(HOT, FIT)] * 60 + [(FIT,)] * 40, set()) == {FIT}
