"""A lesson while it is worked on: run out of order, misspelt, without an end; each gets a sentence."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpulab import recordings
from gpulab.errors import StoreError, UsageError
from gpulab.lessons import lesson as lessons
from gpulab.lessons.catalogue import find_lesson
from gpulab.lessons.check import Checked, Note, right, wrong
from gpulab.lessons.lesson import Hints, Lesson, TimeLimit, hint, open_lesson, time_limit, what_failed
from tests.support.paths import ROOT


@pytest.fixture
def names() -> dict[str, Any]:
    return {}


@pytest.fixture
def lesson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: dict[str, Any]) -> Iterator[Lesson]:
    monkeypatch.setenv("GPULAB_DIR", str(tmp_path))
    monkeypatch.delenv("GPULAB_CLASS", raising=False)
    opened = open_lesson("03", names)
    yield opened
    opened.close()
    lessons._open.clear()


@pytest.mark.parametrize("name", ["03", 3, "3", "03_starving_gpu", "03_starving_gpu.ipynb", "starving"])
def test_a_lesson_has_several_names(name: str | int) -> None:
    assert find_lesson(name).name == "03_starving_gpu"


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda lesson: find_lesson("starving_gpus"), "Did you mean 03_starving_gpu"),
        (lambda lesson: find_lesson("99"), "There are: 00, 01"),
        (lambda lesson: lesson.check("loaders"), "no exercise 'loaders'. Did you mean 'loader'"),
        (lambda lesson: lesson.guess("x"), "no question 'x'. There are: waiting, workers"),
    ],
)
def test_what_does_not_exist_names_the_nearest(lesson: Lesson, ask: Callable[[Lesson], object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ask(lesson)


def test_a_lesson_opens_with_what_it_is(lesson: Lesson) -> None:
    assert "Lesson 03: The starving GPU" in repr(lesson) and "About 30 minutes." in repr(lesson)
    assert "0 of 2 exercises solved here." in repr(lesson) and "class" not in repr(lesson)
    assert [line.kind for line in lesson.progress.lines()] == ["opened"]


def test_a_class_is_announced_and_a_name_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lesson: Lesson
) -> None:
    monkeypatch.setenv("GPULAB_CLASS", str(tmp_path))
    opened = open_lesson("03", {})
    assert f"also goes to the folder {str(tmp_path)!r}" in repr(opened)
    opened.name = "<script>alert(1)</script>"
    assert "<script>" not in opened._repr_html_() and opened.name in repr(opened)
    opened.check("loader")
    files = [path.name for path in tmp_path.glob("*.jsonl") if path.name != "progress.jsonl"]
    assert len(files) == 1 and files[0].startswith("script-alert-1-script-"), "what was written before is renamed"


def test_a_check_that_runs_first_says_which_cell_is_missing(lesson: Lesson, names: dict[str, Any]) -> None:
    checked = lesson.check("loader")
    assert checked.state == "unanswered" and checked.hint.startswith("`my_loader` is not there yet.")
    names |= {"my_loader": ..., "slow_loader": ..., "train": ...}
    assert lesson.check("loader").hint.startswith("Put a DataLoader")
    assert [line.state for line in lesson.progress.lines()] == ["", "unanswered", "unanswered"]


def replace_check(lesson: Lesson, check: Any) -> None:
    lesson.exercises = {"loader": check}


def test_an_answer_that_fails_is_named(lesson: Lesson) -> None:
    def fails() -> Checked:
        raise KeyError("labels")

    replace_check(lesson, fails)
    assert lesson.check("loader").hint == (
        """It does not run. KeyError: 'labels' (in the line 'raise KeyError("labels")')"""
    )
    assert what_failed(StopIteration()) == "StopIteration", "without words or line"


def test_a_check_serves_as_a_graders_hidden_test(lesson: Lesson) -> None:
    guide = (ROOT / "docs" / "class.md").read_text(encoding="utf-8")
    hidden = next(line for line in guide.splitlines() if line.startswith("assert lesson.check"))
    with pytest.raises(AssertionError):
        exec(hidden, {"lesson": lesson})
    replace_check(lesson, lambda: right("Twice as fast."))
    exec(hidden, {"lesson": lesson})


def test_an_answer_without_an_end_is_stopped(lesson: Lesson) -> None:
    def endless() -> Checked:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    replace_check(lesson, endless)
    checked = lesson.check("loader", limit_s=0.2)
    assert checked.state == "wrong" and "a loop that never ends" in checked.hint


def test_the_shorter_of_two_limits_ends_it_and_no_timer_is_left() -> None:
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    for outer_s, inner_s in ((0.3, 100), (100, 0.05)):
        with pytest.raises(TimeLimit), time_limit(outer_s), time_limit(inner_s):
            time.sleep(60)
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0) == before


def test_a_guess_is_revealed_and_noted(lesson: Lesson, names: dict[str, Any]) -> None:
    names["guess_workers"] = lesson.guess("workers")
    assert lesson.reveal("workers").closeness == "not measured"
    assert lesson.progress.lines()[-1].kind == "guess"


def test_without_recordings_a_sentence_says_so(lesson: Lesson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "machine_with", lambda *names: None)
    note = lesson.compare_recorded("workers-0", "workers-8")
    assert len(repr(lesson.compare_recorded("sync-item", "sync-none"))) < len(repr(note)), "said at length once"
    assert isinstance(note, Note) and "make record-gpu" in note.words
    with pytest.raises(StoreError, match="comes without recordings"):
        recordings.open("h200/workers-0", tmp_path)


def test_a_package_that_is_missing_gets_its_command(lesson: Lesson, capsys: pytest.CaptureFixture[str]) -> None:
    assert lesson.has("json") and capsys.readouterr().out == ""
    assert not lesson.has("no_such_package")
    assert "run %pip install no_such_package in a cell" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("digits_not_there", "`digits_not_there` is not there yet"),
        ("import no_such_package.part", "run %pip install no_such_package"),
        ("raise ModuleNotFoundError(name='sklearn.datasets')", "run %pip install scikit-learn in"),
        ("raise ModuleNotFoundError(name='PIL')", "run %pip install pillow in"),
        ("x = (1,", "near line 1, so nothing of it ran"),
        ("1 / 0", None),
    ],
)
def test_errors_that_every_class_meets_get_a_hint(code: str, words: str | None) -> None:
    try:
        exec(compile(code, "<cell>", "exec"), {})
    except (NameError, ImportError, SyntaxError, ZeroDivisionError) as error:
        sentence = hint(error)
        assert (sentence is None) if words is None else (sentence is not None and words in sentence)


def test_hints_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    events = SimpleNamespace(
        register=lambda name, function: registered.append(function),
        unregister=lambda name, function: registered.remove(function),
    )
    monkeypatch.setattr("gpulab.lessons.lesson.cell_code.shell", lambda: SimpleNamespace(events=events))
    Hints.start()
    Hints.start()
    assert len(registered) == 1
    Hints.stop()
    Hints.stop()
    assert registered == []


def test_the_last_right_answer_says_that_the_lesson_is_passed(lesson: Lesson) -> None:
    lesson.exercises = {"one": lambda: right("Good."), "two": lambda: right("Good.")}
    assert "Still to solve in this lesson: two." in repr(lesson.check("one"))
    assert repr(lesson.check("two")) == "Right. Good. With that lesson 03 is passed."
    assert "lesson 03 is passed" in repr(lesson.check("one")), "solved before, and still"
    lesson.exercises = {"one": lambda: wrong("No longer."), "two": lambda: right("Good.")}
    lesson.check("one")
    assert lesson.solved == {"one", "two"} and "2 of 2 exercises solved here." in repr(lesson)
