"""Make the lessons' notebooks from `lessons/*.md`, which read well in a review: `python notebooks/build.py`.

A fenced block whose first line is "```python NAME" is a code cell with the id NAME; what stands between two of them is
a Markdown cell with the id "about-" and the name of the code cell that follows ("end" at the end). Other fenced blocks
belong to their text. A notebook is written without outputs, and is the same each time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parent
LESSONS = sorted((NOTEBOOKS / "lessons").glob("*.md"))

_CODE_CELL = re.compile(r"^```python (?P<id>[a-z0-9-]+)\n(?P<code>.*?)\n```$", re.DOTALL | re.MULTILINE)
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

Cell = dict[str, object]


def notebook_of(lesson: str) -> str:
    """The notebook of a lesson's text, as the file has it."""
    notebook = {"cells": list(_cells(lesson)), "metadata": _METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _cells(lesson: str) -> Iterator[Cell]:
    end = 0
    for found in _CODE_CELL.finditer(lesson):
        yield from _text_cell(lesson[end : found.start()], f"about-{found['id']}")
        yield _cell("code", found["id"], found["code"])
        end = found.end()
    yield from _text_cell(lesson[end:], "end")


def _text_cell(text: str, name: str) -> Iterator[Cell]:
    if text.strip():
        yield _cell("markdown", name, text.strip())


def _cell(kind: str, name: str, text: str) -> Cell:
    cell: Cell = {"cell_type": kind, "id": name, "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell | {"execution_count": None, "outputs": []} if kind == "code" else cell


if __name__ == "__main__":
    for path in LESSONS:
        (NOTEBOOKS / f"{path.stem}.ipynb").write_text(notebook_of(path.read_text(encoding="utf-8")), encoding="utf-8")
