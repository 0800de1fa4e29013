"""Three editions of a notebook from one source: who may see which solution."""

from __future__ import annotations

from typing import Any

from gpulab.lessons.editions import edition, solutions, source

IN_CODE = "<details>\n<summary><b>A solution</b> (click to open)</summary>\n\n```python\nanswer = 42\n```\n\n</details>"
IN_WORDS = (
    "Before.\n\n<details>\n<summary><b>How to read it</b> (click to open)</summary>\n\n"
    "The lowest line.\n\n</details>\n\nAfter."
)


def cell(kind: str, name: str, text: str) -> dict[str, Any]:
    made: dict[str, Any] = {"cell_type": kind, "id": name, "metadata": {}, "source": text}
    return made | ({"outputs": ["shown"], "execution_count": 1} if kind == "code" else {})


def notebook() -> dict[str, Any]:
    return {
        "cells": [
            cell("code", "exercise-figure", "figure = ..."),
            cell("markdown", "about-figure", IN_WORDS),
            cell("code", "exercise-code", "answer = ..."),
            cell("markdown", "about-code", IN_CODE),
        ]
    }


def texts(made: dict[str, Any]) -> list[str]:
    return [source(cell) for cell in made["cells"]]


def test_a_solution_is_code_of_the_exercise_above() -> None:
    assert solutions(notebook()) == {"code": "answer = 42"}


def test_self_study_stays_as_it_is() -> None:
    assert edition(notebook(), "self-study") == notebook()


def test_a_class_gets_neither_code_nor_words() -> None:
    assert texts(edition(notebook(), "class")) == ["figure = ...", "Before.\n\nAfter.", "answer = ..."]


def test_an_instructor_gets_code_in_the_cell_and_words_unfolded() -> None:
    made = edition(notebook(), "instructor")
    assert texts(made) == [
        "figure = ...",
        "Before.\n\n**How to read it**\n\nThe lowest line.\n\nAfter.",
        "answer = ...\n\n# a solution\nanswer = 42",
    ]
    assert made["cells"][2]["outputs"] == [], "what the cell showed was of the code before"
