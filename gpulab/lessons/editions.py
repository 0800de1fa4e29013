"""One source, three editions of a lesson's notebook: for self-study, for a class, and for its instructor.

For self-study each solution is hidden behind a line to click on (`<details>`); for a class there is none. The
instructor's has it in the exercise cell. A block of Python belongs to the last cell above it whose name begins
with "exercise-". A solution in words, of an answer that is a figure of the reader's own run, stands unfolded.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, Literal

Edition = Literal["self-study", "class", "instructor"]
EDITIONS: tuple[Edition, ...] = ("self-study", "class", "instructor")
FOLDER = "gpulab-lessons"  # a learner's own copy of the notebooks
EXERCISE = "exercise-"

_FOLDED = re.compile(r"<details>\s*<summary>(?P<title>.*?)</summary>(?P<content>.*?)</details>\n*", re.DOTALL)
_PYTHON = re.compile(r"```python\n(?P<code>.*?)\n```", re.DOTALL)

Notebook = Mapping[str, Any]  # as JSON has it


def solutions(notebook: Notebook) -> dict[str, str]:
    """The code of each solution, by the name of its exercise: "loader"."""
    by_exercise: dict[str, str] = {}
    exercise = ""
    for cell in notebook["cells"]:
        if cell_name(cell).startswith(EXERCISE):
            exercise = cell_name(cell).removeprefix(EXERCISE)
        elif cell["cell_type"] == "markdown":
            for folded in _FOLDED.finditer(source(cell)):
                if code := _PYTHON.search(folded["content"]):
                    by_exercise[exercise] = code["code"]
    return by_exercise


def edition(notebook: Notebook, kind: Edition) -> dict[str, Any]:
    """The notebook in that edition; the one given stays as it is. Outputs stay, but for those of changed cells."""
    changed: dict[str, Any] = copy.deepcopy(dict(notebook))
    if kind == "self-study":
        return changed
    by_exercise = solutions(notebook)
    for cell in changed["cells"]:
        name = cell_name(cell)
        if cell["cell_type"] == "markdown":
            text = _FOLDED.sub(_unfolded if kind == "instructor" else "", source(cell)).strip()
            cell["source"] = text.splitlines(keepends=True)
        elif kind == "instructor" and name.startswith(EXERCISE) and name.removeprefix(EXERCISE) in by_exercise:
            cell["source"] = solved(source(cell), by_exercise[name.removeprefix(EXERCISE)]).splitlines(keepends=True)
            cell["outputs"], cell["execution_count"] = [], None
    changed["cells"] = [cell for cell in changed["cells"] if cell["cell_type"] != "markdown" or cell["source"]]
    return changed


def solved(exercise: str, solution: str) -> str:
    """The exercise's cell with the solution after what it gives: what is defined anew counts."""
    return f"{exercise.rstrip()}\n\n# a solution\n{solution}"


def cell_name(cell: Mapping[str, Any]) -> str:
    """The name in its metadata, as its text has it; else its id."""
    return str(cell.get("metadata", {}).get("name") or cell.get("id", ""))


def source(cell: Mapping[str, Any]) -> str:
    """The text of a cell, which a file has as one string or as a list of lines."""
    text = cell["source"]
    return text if isinstance(text, str) else "".join(text)


def _unfolded(folded: re.Match[str]) -> str:
    """What is said in words; code stands in the exercise's cell."""
    content = folded["content"].strip()
    title = re.sub(r"<[^>]+>", "", folded["title"]).partition(" (")[0].strip()
    return "" if _PYTHON.search(content) else f"**{title}**\n\n{content}\n\n"
