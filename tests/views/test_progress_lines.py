"""A recorded script says where it stands: soon at a terminal, seldom in a log, in lines of its own."""

from __future__ import annotations

import sys
from io import StringIO

import pytest
from msgspec.structs import replace

from gpulab.live_feed import Status
from gpulab.views.waiting import RunLines, run_lines_or_none, status_words


def status(elapsed_s: float, step: int = 3, total: int | None = None, alert: str = "") -> Status:
    return Status("measuring", step, total, "run", elapsed_s, "device: CPU", alert=alert)


def at_a_terminal() -> tuple[RunLines, StringIO]:
    stream = StringIO()
    return RunLines(stream, "train.py", every_s=10.0), stream


def lines_of(lines: RunLines, stream: StringIO, *times_s: float) -> list[str]:
    for elapsed_s in times_s:
        lines.tell(status(elapsed_s))
    return stream.getvalue().splitlines()


def test_a_terminal_is_told_after_two_seconds_then_every_ten() -> None:
    lines, stream = at_a_terminal()
    said = lines_of(lines, stream, 1.0, 2.1, 3.1, 9.9, 10.2, 11.2, 25.0, 26.0, 30.1)
    assert said == [f"gpulab: running train.py, {s} s: step 3, timing" for s in (2, 10, 25, 30)]


def test_the_report_is_announced_after_a_long_run() -> None:
    for times_s, last in (((0.5, 1.5), []), ((5.0,), ["gpulab: train.py has ended; making its report …"])):
        lines, stream = at_a_terminal()
        lines_of(lines, stream, *times_s)
        lines.end()
        assert stream.getvalue().splitlines()[-1:] == last


def test_alerts_stand_among_them() -> None:
    lines, stream = at_a_terminal()
    lines.tell(status(3.0, alert="Waiting for data for 20 s"))
    assert stream.getvalue().split("\n")[1:3] == [
        "gpulab: Waiting for data for 20 s",
        "gpulab: running train.py, 3 s: step 3, timing",
    ]


@pytest.mark.parametrize(
    ("step", "total", "words"),
    [
        (0, None, "4 s: before the first step"),
        (12, 500, "4 s: step 12 of 500, timing"),
        (81, 56, "4 s: step 81, timing"),
    ],
)
def test_how_far_it_is(step: int, total: int | None, words: str) -> None:
    assert status_words(status(4.0, step, total)) == words


def test_a_loop_may_leave_its_epoch_early() -> None:
    of_epoch = replace(status(4.0, 39, 250), total_of="epoch")
    assert status_words(of_epoch) == "4 s: step 39 of at most 250 (one epoch), timing"


def test_a_log_is_told_soon_then_each_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    lines = run_lines_or_none("train.py")
    assert lines is not None
    for elapsed_s in (2.0, 9.0, 12.0):
        lines.tell(status(elapsed_s, step=0))
    assert lines_of(lines, stream, 20.0, 59.0, 61.0, 90.0, 125.0) == [
        "gpulab: running train.py, 2 s: before the first step",
        "gpulab: running train.py, 12 s: before the first step",
        "gpulab: running train.py, 20 s: step 3, timing",
        "gpulab: running train.py, 61 s: step 3, timing",
        "gpulab: running train.py, 2 min 5 s: step 3, timing",
    ]
    monkeypatch.setattr(sys, "stderr", None)
    assert run_lines_or_none("train.py") is None
