"""Every exercise recognises right answers and gives each wrong one its hint: the tables in answers/."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulab.lessons.catalogue import LESSONS
from gpulab.lessons.check import Checked
from gpulab.lessons.lesson import Exercise

ANSWERS = Path(__file__).parent / "answers"


@functools.cache
def exercises() -> dict[tuple[str, str], Exercise]:
    """By the name of the lesson and their own."""
    every = {}
    for entry in LESSONS:
        judges = getattr(importlib.import_module(f"gpulab.lessons.{entry.module}"), "EXERCISES", {})
        every |= {(entry.name, name): judge for name, judge in judges.items()}
    return every


def cases() -> Iterator[Any]:
    for path in sorted(ANSWERS.glob("*.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        start = table.pop("start", "")
        for exercise, rows in table.items():
            for row in rows:
                state = row.get("state", "wrong")
                name = f"{exercise}-{row['hint'][:30]}"
                yield pytest.param(path.stem, exercise, start, row["answer"], state, row["hint"], id=name)


def evaluated(start: str, answer: str) -> Any:
    """The value of an expression, or the last thing that the code defines."""
    scope: dict[str, Any] = {}
    exec(start, scope)
    last = ast.parse(answer.strip()).body[-1]
    if isinstance(last, ast.Expr):
        return eval(answer.strip(), scope)
    exec(answer, scope)
    assert isinstance(last, ast.FunctionDef | ast.ClassDef)
    return scope[last.name]


@pytest.mark.parametrize(("lesson", "exercise", "start", "answer", "state", "hint"), [*cases()])
def test_an_answer_gets_its_hint(lesson: str, exercise: str, start: str, answer: str, state: str, hint: str) -> None:
    checked = exercises()[lesson, exercise](evaluated(start, answer))
    assert (checked.state, hint.lower() in checked.hint.lower()) == (state, True), checked


@pytest.mark.parametrize("exercise", exercises().values(), ids=["-".join(names) for names in exercises()])
def test_dots_are_no_answer(exercise: Exercise) -> None:
    checked: Checked = exercise(*(... for _ in inspect.signature(exercise).parameters))
    assert checked.state == "unanswered" and checked.hint, checked
