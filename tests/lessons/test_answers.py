"""Every exercise recognises right answers and gives each wrong one its hint: the tables in answers/."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulab.lessons.catalogue import LESSONS
from gpulab.lessons.check import Checked, Exercise, Speed, wrong
from gpulab.lessons.lesson import exercises_of, what_failed

ANSWERS = Path(__file__).parent / "answers"


@functools.cache
def exercises() -> dict[tuple[str, str], Exercise]:
    """By the name of the lesson and their own."""
    return {(entry.name, name): judge for entry in LESSONS for name, judge in exercises_of(entry).items()}


def cases() -> Iterator[Any]:
    for path in sorted(ANSWERS.glob("*.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        start, fixtures = table.pop("start", ""), table.pop("fixtures", {})
        for exercise, rows in table.items():
            for row in rows:
                row["fixture"] = fixtures.get(exercise, "pytestconfig")
                state = row.get("state", "wrong")
                name = f"{exercise}-{row['hint'][:30]}"
                yield pytest.param(path.stem, exercise, start, row, state, id=name)


def evaluated(answer: str, scope: dict[str, Any]) -> Any:
    """The value of an expression, or the last thing that the code defines."""
    last = ast.parse(answer.strip()).body[-1]
    if isinstance(last, ast.Expr):
        return eval(answer.strip(), scope)
    exec(answer, scope)
    assert isinstance(last, ast.FunctionDef | ast.ClassDef)
    return scope[last.name]


@pytest.mark.parametrize(("lesson", "exercise", "start", "row", "state"), [*cases()])
def test_an_answer_gets_its_hint(
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    lesson: str,
    exercise: str,
    start: str,
    row: dict[str, Any],
    state: str,
) -> None:
    request.getfixturevalue(row["fixture"])
    judge = exercises()[lesson, exercise]
    if "interval" in row:  # of how many times as fast it is, in place of measuring
        low, high = row["interval"]
        speed = Speed(math.sqrt(low * high), (low, high), 1.0, 1.0, 9)
        monkeypatch.setattr("gpulab.lessons.check.time_pairs", lambda *measures, **bounds: speed)
    scope: dict[str, Any] = {}
    exec(start, scope)
    answer = evaluated(row["answer"], scope)
    _, *others = inspect.signature(judge).parameters  # what the notebook has besides, by its name
    try:
        checked = judge(answer, *(scope[name] for name in others))
    except Exception as e:  # as a lesson takes it
        checked = wrong(f"It does not run. {what_failed(e)}")
    assert (checked.state, row["hint"].lower() in checked.hint.lower()) == (state, True), checked


@pytest.mark.parametrize("exercise", exercises().values(), ids=["-".join(names) for names in exercises()])
def test_dots_are_no_answer(exercise: Exercise) -> None:
    checked: Checked = exercise(*(... for _ in inspect.signature(exercise).parameters))
    assert checked.state == "unanswered" and checked.hint, checked
