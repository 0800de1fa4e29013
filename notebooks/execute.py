"""Make the notebooks from `lessons/*.md` and run them: `make notebooks`, or `make notebooks LESSON=03` for one.

The texts are jupytext's MyST Markdown. A notebook keeps what its cells showed, without what needs a live kernel, and
README.md lists what each lesson measured here. Run it on a quiet machine: its figures are what readers see.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jupytext
import nbclient
import nbformat
from nbformat import NotebookNode

if TYPE_CHECKING:
    from gpulab.lessons.catalogue import Entry

NOTEBOOKS = Path(__file__).resolve().parent
TEXTS = NOTEBOOKS / "lessons"
TIMEOUT_S = 600
LARGEST_BYTES = 1_000_000  # of a notebook with its outputs
LONGEST_SILENCE_S = 3.0  # a cell says that it is at work after two seconds
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

_KEPT = ("text/plain", "text/html", "text/markdown", "image/png", "image/svg+xml")
REVEAL = "reveal-"
_MEASURED = re.compile(r"Measured: (.+?)\.(?= Your guess|$)")


def notebook_of(text: Path) -> NotebookNode:
    """The notebook of a lesson's text, without outputs: a code cell's id is its name, and the same each time."""
    notebook = jupytext.read(text)
    notebook.nbformat_minor = 5
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    following = "end"
    for cell in reversed(notebook.cells):
        if cell.cell_type == "code":
            following = cell.metadata.get("name") or following
            cell.id = following
        else:
            cell.id = f"about-{following}"[:64]
    ids: dict[str, int] = {}
    for cell in notebook.cells:
        ids[cell.id] = ids.get(cell.id, 0) + 1
        cell.id += f"-{ids[cell.id]}" if ids[cell.id] > 1 else ""
    return notebook


def executed(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Run it in `folder`, and keep what a reader without a kernel can see."""
    resources = {"metadata": {"path": str(folder)}}
    began_s = time.monotonic()
    client = _Client(notebook, timeout=TIMEOUT_S, kernel_name="python3", resources=resources)
    client.execute()
    notebook.metadata["gpulab"] = {"run_all_s": round(time.monotonic() - began_s)}
    notebook.metadata.pop("widgets", None)
    print("  " + ", ".join(f"{cell.id} {s:.0f} s" for cell, s in _times(notebook) if s >= 4), file=sys.stderr)
    silent = {name: s for name, s in client.silence_s.items() if s > LONGEST_SILENCE_S}
    print("  " + "".join(f"{name} was silent for {s:.1f} s; " for name, s in silent.items()), file=sys.stderr)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata.pop("execution", None)
            cell.outputs = list(_readable(cell.outputs))
    return notebook


class _Client(nbclient.NotebookClient):
    """Notes for how long each cell showed nothing while it ran."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.silence_s: dict[str, float] = {}
        self._last_s = 0.0

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> Any:
        now_s = time.monotonic()
        if msg["msg_type"] not in ("execute_input", "status") or msg["content"].get("execution_state") == "idle":
            self.silence_s[cell.id] = max(self.silence_s.get(cell.id, 0.0), now_s - self._last_s)
        self._last_s = now_s
        return super().process_message(msg, cell, cell_index)


def _times(notebook: NotebookNode) -> Iterator[tuple[NotebookNode, float]]:
    """Each code cell and how long it ran."""
    for cell in notebook.cells:
        stamps = cell.metadata.get("execution", {})
        if {"iopub.execute_input", "shell.execute_reply"} <= stamps.keys():
            begin, end = (datetime.fromisoformat(stamps[k]) for k in ("iopub.execute_input", "shell.execute_reply"))
            yield cell, (end - begin).total_seconds()


def _readable(outputs: Sequence[NotebookNode]) -> Iterator[NotebookNode]:
    for output in outputs:
        if "data" in output:
            output.data = {kind: data for kind, data in output.data.items() if kind in _KEPT}
            output.metadata = {}
            if not any(str(data).strip() for data in output.data.values()):
                continue  # where a progress line or a Stop button was
        yield output


def updated(notebook: NotebookNode, before: NotebookNode) -> NotebookNode | None:
    """The notebook with the outputs of `before`, where only its Markdown has changed since; None where code has."""
    code = [[cell for cell in of.cells if cell.cell_type == "code"] for of in (notebook, before)]
    if [(cell.id, cell.source) for cell in code[0]] != [(cell.id, cell.source) for cell in code[1]]:
        return None
    for new, old in zip(*code, strict=True):
        new.outputs, new.execution_count = old.outputs, old.execution_count
    notebook.metadata["gpulab"] = before.metadata.get("gpulab", {})
    return notebook


def measured(notebook: NotebookNode) -> dict[str, str]:
    """What its guesses were held against, by question: "speedup 2.1× (2.0–2.2) with two workers"."""
    cells = [cell for cell in notebook.cells if cell.get("id", "").startswith(REVEAL)]
    matches = {cell.id.removeprefix(REVEAL): _MEASURED.search("".join(_texts(cell))) for cell in cells}
    return {question: match[1] for question, match in matches.items() if match}


def _texts(cell: NotebookNode) -> Iterator[str]:
    for output in cell.outputs:
        yield "".join(output.get("data", {}).get("text/plain", ""))


def shipped() -> list[tuple[Entry, NotebookNode]]:
    """The lessons with their notebooks, as they lie here."""
    from gpulab.lessons.catalogue import LESSONS

    paths = [(entry, NOTEBOOKS / f"{entry.name}.ipynb") for entry in LESSONS]
    return [(entry, nbformat.read(path, as_version=4)) for entry, path in paths if path.is_file()]


def table() -> str:
    """The lessons, how long they take and what each measured."""
    rows = ["| lesson | minutes | all cells | measured when it was shipped |", "|---|---|---|---|"]
    for entry, notebook in shipped():
        figures, ran_s = "; ".join(measured(notebook).values()), notebook.metadata.get("gpulab", {}).get("run_all_s")
        link = f"[{entry.number} {entry.title}]({entry.name}.ipynb)"
        ran = "–" if ran_s is None else f"{ran_s} s"
        rows.append(f"| {link} | {entry.minutes} | {ran} | {figures or '–'} |")
    return "\n".join(rows)


def plain_list() -> str:
    """The lessons alone, two in a line."""
    links = [f"[{entry.number} {entry.title}](notebooks/{entry.name}.ipynb)" for entry, _ in shipped()]
    return "\n".join(f"- {' · '.join(links[at : at + 2])}" for at in range(0, len(links), 2))


def listed(readme: str, lessons: Callable[[], str]) -> str:
    """A README with the lessons between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{lessons()}\n{END}{after}"


READMES = {NOTEBOOKS / "README.md": table, NOTEBOOKS.parent / "README.md": plain_list}
FIGURES = NOTEBOOKS.parent / "gpulab" / "lessons" / "shipped.json"


def figures() -> str:
    """What `lesson.reveal` shows beside a factor that it could not decide here."""
    by_lesson = {entry.name: measured(notebook) for entry, notebook in shipped()}
    return json.dumps(by_lesson, indent=1, ensure_ascii=False) + "\n"


def write_figures() -> None:
    """Put the lessons, and what they measured, where readers and lessons look for it."""
    for readme, lessons in READMES.items():
        readme.write_text(listed(readme.read_text(encoding="utf-8"), lessons), encoding="utf-8")
    FIGURES.write_text(figures(), encoding="utf-8")


def main() -> None:
    """Make the notebooks that are asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lessons", nargs="*", help="their numbers; none: all of them")
    parser.add_argument("--text", action="store_true", help="run nothing where only Markdown has changed")
    options = parser.parse_args()
    texts = [t for t in sorted(TEXTS.glob("*.md")) if not options.lessons or t.stem[:2] in options.lessons]
    for text in texts:
        there = NOTEBOOKS / f"{text.stem}.ipynb"
        if options.text and there.is_file():
            kept = updated(notebook_of(text), nbformat.read(there, as_version=4))
            if kept is not None:
                there.write_text(nbformat.writes(kept) + "\n", encoding="utf-8")
                continue
        with tempfile.TemporaryDirectory(prefix="gpulab-lesson-") as folder:
            os.environ["GPULAB_DIR"] = ".gpulab"
            notebook = executed(notebook_of(text), Path(folder))
            content = nbformat.writes(notebook)
            for path in (folder, sys.prefix, str(NOTEBOOKS.parent), str(Path.home()), tempfile.gettempdir()):
                content = content.replace(path, "…")  # whose machine it was is nobody's affair
        if len(content) > LARGEST_BYTES:
            sys.exit(f"{text.stem} would have {len(content):,} bytes: its outputs are too large to be shipped")
        (NOTEBOOKS / f"{text.stem}.ipynb").write_text(content + "\n", encoding="utf-8")
        print(
            f"{text.stem}: {len(content) / 1e3:.0f} kB; measured: {'; '.join(measured(notebook).values()) or 'nothing'}"
        )
    write_figures()


if __name__ == "__main__":
    main()
