"""One source, three editions of a lesson's notebook: for self-study, for a class, and for its instructor.

The self-study edition hides each solution behind a line to click on (`<details>`); the class edition has none; the
instructor's edition has it in the exercise cell. A block of Python belongs to the last cell above it whose name begins
with "exercise-". A solution in words, for an answer from the reader's own run, is shown unfolded.

`gpulab lab` copies the installed lessons for a learner and never overwrites existing files.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from gpulab.errors import StoreError, UsageError
from gpulab.formatting import plural
from gpulab.lessons.catalogue import find_lesson
from gpulab.store.files import reason
from gpulab.user_code import PACKAGE_FOLDER
from gpulab.views.view import Answer
from gpulab.views.wording import plain

Edition = Literal["self-study", "class", "instructor"]
EXERCISE = "exercise-"

_FOLDED = re.compile(r"<details>\s*<summary>(?P<title>.*?)</summary>(?P<content>.*?)</details>\n*", re.DOTALL)
_PYTHON = re.compile(r"```python\n(?P<code>.*?)\n```", re.DOTALL)

Notebook = Mapping[str, Any]  # as parsed from JSON


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
    """A copy of the notebook in that edition. Outputs are kept, except those of changed cells."""
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
    """The exercise's cell followed by the solution, whose definitions replace those of the cell."""
    return f"{exercise.rstrip()}\n\n# a solution\n{solution}"


def cell_name(cell: Mapping[str, Any]) -> str:
    """The name of a cell in its metadata, else its id."""
    return str(cell.get("metadata", {}).get("name") or cell.get("id", ""))


def source(cell: Mapping[str, Any]) -> str:
    """The text of a cell, which a file stores as one string or as a list of lines."""
    text = cell["source"]
    return text if isinstance(text, str) else "".join(text)


def _unfolded(folded: re.Match[str]) -> str:
    """The words of a folded solution; its code goes into the exercise's cell."""
    content = folded["content"].strip()
    title = re.sub(r"<[^>]+>", "", folded["title"]).partition(" (")[0].strip()
    return "" if _PYTHON.search(content) else f"**{title}**\n\n{content}\n\n"


INSTALLED = "share/gpulab/notebooks"  # below the environment's data folder, as pyproject.toml says
FIRST = "00_quick_start.ipynb"


class Copied(Struct, frozen=True):
    """The result of a copy: the names of new notebooks, and of existing notebooks, which are unchanged."""

    folder: Path
    new: tuple[str, ...]
    present: tuple[str, ...]


def open_lessons(options: argparse.Namespace) -> Answer:
    """Run `gpulab lab`; the exit status is that of JupyterLab. Raises UsageError and StoreError."""
    entry = find_lesson(options.lesson)
    copied = copy_lessons(options.folder.absolute(), options.edition)
    folder = plain(str(copied.folder))
    if copied.new:
        print(f"{plural(len(copied.new), 'lesson')} copied to {folder}")
    if copied.present:
        print(f"{plural(len(copied.present), 'lesson')} in {folder} kept: your copies are never overwritten")
    if options.no_open:
        return Answer()
    command = jupyterlab_command(copied.folder, entry.name, options.args)
    print(f"Opening JupyterLab on lesson {entry.number}. Press Ctrl+C twice to quit.", flush=True)
    try:
        return Answer(status=subprocess.call(command, cwd=copied.folder))
    except KeyboardInterrupt:
        return Answer()


def notebooks() -> list[Path]:
    """The lessons as shipped: from the checkout that this gpulab runs from, else from the installed package.

    Raises UsageError if there are none.
    """
    places = (PACKAGE_FOLDER.parent / "notebooks", Path(sysconfig.get_path("data")) / INSTALLED)
    for place in places:
        if (place / FIRST).is_file():
            return sorted(place.glob("*.ipynb"))
    raise UsageError(
        f"The lessons are not installed: neither {str(places[0])!r} nor {str(places[1])!r} has them. Install gpulab "
        "again, or open them from a clone."
    )


def copy_lessons(folder: Path, kind: Edition = "self-study") -> Copied:
    """Copy every missing lesson, without its outputs, which would reveal what the reader should guess.

    Raises StoreError if the folder cannot be written.
    """
    new, present = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in notebooks():
            notebook = edition(json.loads(source.read_text(encoding="utf-8")), kind)
            try:
                with (folder / source.name).open("x", encoding="utf-8") as file:
                    json.dump(_without_outputs(notebook), file, indent=1, ensure_ascii=False)
                new.append(source.stem)
            except FileExistsError:
                present.append(source.stem)
    except OSError as e:
        raise StoreError(f"The lessons cannot be copied to {str(folder)!r}: {reason(e)}.") from e
    return Copied(folder, tuple(new), tuple(present))


def _without_outputs(notebook: Any) -> Any:
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return notebook


def jupyterlab_command(folder: Path, notebook: str, args: Sequence[str]) -> list[str]:
    """The command that opens JupyterLab in the folder on that notebook.

    Raises UsageError if JupyterLab is not installed or would refuse to run.
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise UsageError("JupyterLab is not installed: pip install 'gpulab[demo,lab]', then gpulab lab again.")
    if _is_superuser() and "--allow-root" not in args:
        raise UsageError(
            "You are root, as which JupyterLab runs only if it is told to: gpulab lab -- --allow-root "
            "(make lab LAB_FLAGS=--allow-root)."
        )
    return [
        sys.executable,
        "-m",
        "jupyter",
        "lab",
        f"--ServerApp.root_dir={folder}",
        f"--LabApp.default_url=/lab/tree/{notebook}.ipynb",
        *args,
    ]


def _is_superuser() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0
