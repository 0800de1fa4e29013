"""Numbers of options: read from a line, given in Python or to argparse, and refused in the same sentence."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from IPython.core.error import UsageError as LineError
from IPython.core.interactiveshell import InteractiveShell

import gpulab
from gpulab import cli, magics
from gpulab.api import climb, experiment
from gpulab.demo import __main__ as demo
from gpulab.errors import UsageError
from gpulab.options import check_seconds, check_whole_number, seconds_type, whole_number_type, without_comment
from tests.support.commands import answered


def test_whole_numbers() -> None:
    read = whole_number_type("--steps", 1)
    assert [read(text) for text in ("5", " 7 ", "0012")] == [5, 7, 12]
    for text in ("many", "2.5", "1e3", "", "0x10", "-5", "0", "²", "٣"):
        with pytest.raises(UsageError) as caught:
            read(text)
        assert str(caught.value) == f"--steps must be an integer ≥ 1, got {text!r}."
    for value in ("5", 2.0, True, 0, -1, math.nan):
        with pytest.raises(UsageError, match="--pairs must be an integer ≥ 1, got "):
            check_whole_number("--pairs", value, 1)
    check_whole_number("--pairs", None, 1)
    check_whole_number("--pairs", 1, 1)


def test_seconds() -> None:
    assert seconds_type("--budget")("1.5") == 1.5
    for text in ("soon", "0", "-3", "nan", ""):
        with pytest.raises(UsageError, match="--budget must be a number of seconds > 0, got "):
            seconds_type("--budget")(text)
    for value in ("60", 0, -1.0, math.nan, True, None):
        with pytest.raises(UsageError, match="--budget must be a number of seconds > 0, got "):
            check_seconds("--budget", value)


def nothing() -> None:
    """Code that does not run: its options are wrong."""
    raise AssertionError("it ran")


def of_the_magic() -> None:
    shell = InteractiveShell.instance()
    magics.register(shell)
    try:
        shell.run_cell_magic("gpuprofile", "--steps 0", "1 / 0")
    finally:
        magics.unregister(shell)
        InteractiveShell.clear_instance()


@pytest.mark.parametrize(
    "use",
    [
        lambda: gpulab.profile(steps=0),
        lambda: climb.climb(nothing, steps=0),
        lambda: answered("climb --steps 0"),
        lambda: experiment.headspace(nothing, steps=0),
        lambda: answered("headspace --steps 0"),
        lambda: gpulab.experiment(nothing, {"workers": 2}, steps=0),
        of_the_magic,
    ],
    ids=["profile", "climb", "%climb", "headspace", "%headspace", "experiment", "%%gpuprofile"],
)
def test_each_way_to_ask_says_the_same(use: Callable[[], object]) -> None:
    with pytest.raises((UsageError, LineError), match=r"--steps must be an integer ≥ 1, got '?0'?\."):
        use()


def test_each_command_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["record", "--steps", "0", "x.py"]) != 0
    with pytest.raises(SystemExit):
        demo.main(["--steps", "0"])
    assert capsys.readouterr().err.count("--steps must be an integer ≥ 1, got '0'.") == 2


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("--ranks 2   # the cell in two processes", "--ranks 2"),
        ("# all of it", ""),
        ("run#3 --ab x=2", "run#3 --ab x=2"),
        ("'a # b' --name \"c # d\" # e", "'a # b' --name \"c # d\""),
        ("--name it's # open", "--name it's # open"),
        ("", ""),
    ],
)
def test_a_comment_ends_a_line_outside_quotes(line: str, left: str) -> None:
    assert without_comment(line) == left
