"""Lines that hold the steps within them, told from hot lines that nearly all looks have met."""

from __future__ import annotations

from gpulab.capture.pauses.line_watch import throughout

FIT, HOT, UPDATE = ("train.py", 9, "main"), ("train.py", 4, "metric"), ("train.py", 6, "main")


def test_which_lines_hold_the_steps() -> None:
    looks = [(HOT, FIT)] * 60 + [(FIT,)] * 40
    assert throughout([(HOT,)] * 100, {UPDATE}) == set(), "it takes nearly all the time, and that is all"
    assert throughout(looks, {FIT, UPDATE}) == {FIT}, "it calls the update"
    assert throughout(looks, set()) == {FIT}, "without an update, what is always there"
