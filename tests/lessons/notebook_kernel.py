"""Runs a lesson's notebook as a learner's JupyterLab would, each cell's output as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import nbclient
import nbformat
from nbformat import NotebookNode

from gpulab.lessons.editions import cell_name
from tests.support import leftovers
from tests.support.paths import ROOT

NOTEBOOKS = ROOT / "notebooks"
LONG_S = 900  # for a notebook on a busy machine
LEFT_BEHIND = """
scope = {"__name__": "leftovers"}
exec(%r, scope)
lesson.close()
print(scope["leftovers"]())
""" % Path(leftovers.__file__).read_text(encoding="utf-8")  # noqa: UP031


def shipped(name: str) -> NotebookNode:
    """The notebook as it is shipped, with its outputs."""
    notebook: NotebookNode = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    return notebook


def execute(notebook: NotebookNode, folder: Path, further: Sequence[tuple[str, str]] = ()) -> dict[str, list[str]]:
    """What each code cell showed, by its name; `further` cells run after the last. Raises where a cell raises."""
    for name, code in further:
        notebook.cells.append(nbformat.v4.new_code_cell(code, metadata={"name": name}))
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=LONG_S, kernel_name="python3", resources=resources).execute()
    return {cell_name(cell): [*texts(cell)] for cell in notebook.cells if cell.cell_type == "code"}


def texts(cell: NotebookNode) -> Iterator[str]:
    """The text of each output; the place of a progress line or a button stays, and is empty."""
    for output in cell.outputs:
        assert output.output_type != "error"
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        if text:
            yield text
