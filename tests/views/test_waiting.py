"""A command that takes long says so at a terminal, and leaves nothing of it there."""

from __future__ import annotations

import sys
import threading
import time
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest

from gpulab import cli
from gpulab.api import doctor
from gpulab.views import waiting as module
from gpulab.views.waiting import BAR, LEAST_FRACTION, TerminalLine, Wait, waiting
from tests.support.kernel_session import kernel


class Terminal(StringIO):
    """Wakes who waits for a line."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In place of standard error. No fixture: pytest puts its own there before the test begins."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    return made


def test_a_long_wait_is_said_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    with waiting("reading big.json", first_s=0.0, renewed_s=600.0):
        assert stream.written.wait(60)
    said = stream.getvalue()
    assert said.startswith("\rgpulab: reading big.json, ") and said.endswith("\r")
    assert said.rstrip("\r").endswith(" "), "blanks over the line"
    assert not [t for t in threading.enumerate() if t.name == "gpulab-waiting"]


def test_a_log_is_told_once_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for log, said in ((True, "gpulab: importing PyTorch …\n"), (False, "")):
        stream = StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        line = waiting("importing PyTorch", first_s=0.0, renewed_s=0.0, log=log)
        with line:
            while log and not stream.getvalue():
                time.sleep(0.001)
        assert stream.getvalue() == said


def test_of_waits_within_each_other_the_outer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    with waiting("reading big.json", first_s=600.0), waiting("making the report", first_s=0.0):
        assert not [t for t in threading.enumerate() if t.name == "gpulab-waiting"][1:]
    assert stream.getvalue() == ""


def test_the_inner_wait_has_the_words_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch)
    with waiting("reading", first_s=600.0) as outer:
        outer.tell(0.5)
        with waiting("making the report") as inner:
            assert inner is outer and "making the report" in outer.words(0.0) and "%" not in outer.words(0.0)
        assert "reading" in outer.words(0.0) and "50 %" in outer.words(0.0)


@pytest.mark.parametrize("fraction", [LEAST_FRACTION, 0.25, 0.5, 0.99])
def test_a_bar_is_as_long_as_what_is_done(fraction: float) -> None:
    wait = Wait("reading")
    wait.tell(fraction)
    words = wait.words(0.0)
    assert words.count("#") == round(BAR * fraction) and f"{100 * fraction:.0f} %" in words
    assert words.endswith(" left") and "about less" not in words
    wait.tell(1.0)
    for none in (Wait("reading"), wait):
        assert "[" not in none.words(0.0) and "left" not in none.words(0.0)


def test_a_line_is_no_wider_than_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "30")
    TerminalLine().write("x" * 100)
    assert stream.getvalue() == "\r" + "x" * 29


@pytest.mark.parametrize(("stream", "first_s"), [(StringIO(), 0.0), (Terminal(), 600.0)], ids=["file", "short wait"])
def test_a_file_gets_no_line_and_a_short_wait_none(
    stream: StringIO, first_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with waiting("reading", first_s=first_s):
        pass
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("argv", "module"), [(["report", "x"], module), (["compare", "x", "y"], module), (["doctor"], doctor)]
)
def test_commands_of_the_terminal_wait_so(argv: list[str], module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def noted(what: str) -> object:
        said.append(what)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "waiting", noted)
    with pytest.raises(KeyboardInterrupt):
        cli.main(argv)
    assert len(said) == 1


LONG = """
import threading
from gpulab.views.waiting import waiting
from gpulab.views.widgets import Output
shown = threading.Event()
write = Output.write
def written(self, text):
    write(self, text)
    shown.set()
Output.write = written
with waiting("reading <b>big</b>.json", first_s=0.0, renewed_s=600.0):
    assert shown.wait(60)
"""


def test_in_a_notebook_it_is_an_output_emptied_at_the_end(tmp_path: Path) -> None:
    with kernel(tmp_path) as session:
        answer = session.run(LONG)
    assert answer.error is None
    (first,) = answer.shown_first.values()
    assert "reading &lt;b&gt;big&lt;/b&gt;.json, " in first["text/html"]
    assert [shown["text/html"] for shown in answer.displays()] == [""]
