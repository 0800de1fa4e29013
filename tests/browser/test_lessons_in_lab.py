"""A lesson as a learner meets it in JupyterLab: turn, guess, run, check; and the board of the class that follows."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Locator, expect

from gpulab.lessons.editions import cell_name, solutions, source
from gpulab.lessons.progress import ClassFolder, Learner, Line, now
from tests.browser.conftest import OpenNotebook
from tests.browser.jupyterlab_page import NotebookPage
from tests.support.paths import ROOT

pytestmark = pytest.mark.browser

IN_A_CLASS = """
import os
os.environ["GPULAB_CLASS"], os.environ["GPULAB_DIR"] = {folder!r}, {own!r}
"""
SLIDERS = "from gpulab.lessons.lanes import GpuStep, turn\nturn(GpuStep())"  # lesson 09's cell
HOSTILE = "<script>alert(1)</script>"


class LessonPage:
    """A lesson's cells by their names."""

    def __init__(self, notebook: NotebookPage, names: list[str]) -> None:
        self.notebook = notebook
        self._names = names

    def run(self, *names: str) -> Locator:
        """Run these cells, one after the other; returns the output of the last."""
        for name in names:
            output = self.notebook.run_cell(self._names.index(name))
        return output

    def write(self, name: str, code: str) -> None:
        self.notebook.write(self._names.index(name), code)


@pytest.mark.slow("two notebooks, and a lesson's comparison in blocks")
def test_a_learner_and_the_board(open_notebook: OpenNotebook, tmp_path: Path, shots: Path) -> None:
    folder = tmp_path / "class"
    folder.mkdir(mode=0o700)
    teacher = open_notebook(["%load_ext gpulab", f"%gpulab board {folder}", "%gpulab board --stop"])
    teacher.run_cell(0)
    board = teacher.run_cell(1)
    expect(board).to_contain_text("Nobody has opened a lesson yet.")

    notebook = nbformat.read(ROOT / "notebooks" / "05_batch_size.ipynb", as_version=4)
    cells = {cell_name(cell): source(cell) for cell in notebook.cells if cell.cell_type == "code"}
    cells["batch-of-32"] = cells["batch-of-32"].replace("--pairs 6", "--pairs 3")
    cells = {"class": IN_A_CLASS.format(folder=str(folder), own=str(tmp_path / "runs")), "turn": SLIDERS, **cells}
    lesson = LessonPage(open_notebook([*cells.values()]), [*cells])
    expect(lesson.run("class", "open-lesson")).to_contain_text("This is a class")
    expect(lesson.run("figure").locator("img")).to_be_visible()
    turn(lesson.run("turn"))

    lesson.run("setup")
    field = lesson.run("guess-batch").get_by_label("Your guess")
    expect(field).to_be_visible()
    field.fill("2")
    field.press("Enter")
    lesson.notebook.screenshot(shots / "lesson-guess.png")
    lesson.run("batch-of-32")
    expect(lesson.run("reveal-batch")).to_contain_text(re.compile(r"Your guess was 2×\.|Undecided\."))

    lesson.write("exercise-one-step", "def one_step(model, optimizer, loss_function, batches:\n    pass")
    expect(lesson.run("exercise-one-step")).to_contain_text("Python could not read this cell")
    answer = solutions(notebook)["one-step"]
    lesson.write("exercise-one-step", answer.replace(" / len(batches)", ""))
    expect(lesson.run("exercise-one-step", "check-one-step")).to_contain_text("4 times too far")
    lesson.write("exercise-one-step", answer)
    checked = lesson.run("exercise-one-step", "check-one-step")
    expect(checked).to_contain_text("Right.")
    lesson.notebook.screenshot(shots / "lesson-check.png", of=checked)

    for name in (HOSTILE, "Chen"):
        of_another = ClassFolder(folder, Learner(name, "0123abcd"))
        assert of_another.write(Line("05_batch_size", "one-step", "check", "right", now())) is None
    expect(board).to_contain_text("3 learners")
    expect(board.get_by_text("✓", exact=True)).to_have_count(4)  # one for each, and the legend's
    expect(board.get_by_text(HOSTILE)).to_be_visible()
    teacher.screenshot(shots / "board.png", of=board)
    teacher.run_cell(2)
    assert not [text for text in teacher.console if "alert" in text]


def turn(output: Locator) -> None:
    """A slider draws the picture anew."""
    picture = output.locator("img")
    expect(picture).to_be_visible()
    before = picture.get_attribute("src")
    output.locator(".widget-slider .noUi-handle, .widget-slider input").first.press("ArrowRight")
    expect(picture).not_to_have_attribute("src", before or "")
