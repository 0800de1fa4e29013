"""Lessons as a learner meets them in JupyterLab: guess, run, turn, check; and the board with three kernels writing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, expect

from gpulab.lessons.editions import cell_name, solutions, source
from tests.browser.conftest import SHUT_DOWN, OpenNotebook
from tests.browser.jupyterlab_page import PATIENCE_MS, LabServer, NotebookPage
from tests.support.paths import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

SET_SOURCE = """
([index, source]) => {
  const cells = window.jupyterapp.shell.currentWidget.content.widgets.map((cell) => cell.model);
  cells.filter((model) => model.type === "code")[index].sharedModel.setSource(source);
}
"""


class LessonPage:
    """A lesson open in JupyterLab; its cells by their names."""

    def __init__(self, notebook: NotebookPage, names: list[str]) -> None:
        self.notebook = notebook
        self._names = names

    def index(self, name: str) -> int:
        return self._names.index(name)

    def run(self, *names: str) -> Locator:
        """Run these cells, one after the other; returns the output of the last."""
        for name in names:
            output = self.notebook.run_cell(self.index(name))
        return output

    def write(self, name: str, code: str) -> None:
        """What typing it into the cell does."""
        self.notebook.page.evaluate(SET_SOURCE, [self.index(name), code])

    def guess(self, name: str, value: str) -> None:
        """Run the cell of a guess, and type into its field."""
        field = self.run(f"guess-{name}").get_by_label("Your guess")
        expect(field).to_be_visible()
        field.fill(value)
        field.press("Enter")


OpenLesson = Callable[[str], LessonPage]


@pytest.fixture
def open_lesson(chromium: Browser, lab_server: LabServer) -> Iterator[OpenLesson]:
    contexts: list[BrowserContext] = []

    def opened(name: str) -> LessonPage:
        notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        for cell in code:
            cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, lab_server.notebooks / f"learner-{name}.ipynb")
        context = chromium.new_context(viewport={"width": 1280, "height": 1080})
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = NotebookPage(context.new_page(), lab_server, f"learner-{name}.ipynb")
        return LessonPage(page, [cell_name(cell) for cell in code])

    yield opened
    for context in contexts:
        for page in context.pages:
            page.evaluate(SHUT_DOWN)
        context.close()


def solution(name: str, exercise: str) -> str:
    return solutions(nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4))[exercise]


def exercise_of(name: str, exercise: str) -> str:
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    return next(source(cell) for cell in notebook.cells if cell_name(cell) == f"exercise-{exercise}")


def test_lesson_03_as_a_learner(open_lesson: OpenLesson, shots: Path) -> None:
    name = "03_starving_gpu"
    lesson = open_lesson(name)
    expect(lesson.run("open-lesson")).to_contain_text("Lesson 03: The starving GPU")
    expect(lesson.run("starving")).to_contain_text("`DataLoader` is not there yet")  # too early
    expect(lesson.run("check-loader")).to_contain_text("`my_loader` is not there yet")
    lesson.run("figure", "setup")
    lesson.guess("waiting", "78")
    lesson.notebook.screenshot(shots / "lesson-03-guess.png")
    lesson.run("starving")
    expect(lesson.run("reveal-waiting")).to_contain_text("Your guess was 78 %.")

    lesson.guess("workers", "3")
    lesson.run("two-workers")
    expect(lesson.run("reveal-workers")).to_contain_text(re.compile(r"Your guess was 3\.|Undecided\."))

    expect(lesson.run("exercise-loader", "check-loader")).to_contain_text("Not answered yet.")
    given = exercise_of(name, "loader")
    lesson.write("exercise-loader", f"{given}\n\nmy_loader = [1, 2, 3]")
    expect(lesson.run("exercise-loader", "check-loader")).to_contain_text("That is a list")
    lesson.write("exercise-loader", f"{given}\n\n{solution(name, 'loader')}")
    checked = lesson.run("exercise-loader", "check-loader")
    expect(checked).to_contain_text(re.compile(r"Right\.|Undecided\."))
    lesson.notebook.screenshot(shots / "lesson-03-check.png", of=checked)


def test_lesson_05_as_a_learner(open_lesson: OpenLesson, shots: Path) -> None:
    name = "05_batch_size"
    lesson = open_lesson(name)
    lesson.run("open-lesson")
    expect(lesson.run("figure").locator("img")).to_be_visible()
    lesson.run("setup")
    lesson.guess("batch", "2")
    lesson.run("batch-of-32")
    expect(lesson.run("reveal-batch")).to_contain_text(re.compile(r"Your guess was 2\.|Undecided\."))

    lesson.write("exercise-one-step", "def one_step(model, optimizer, loss_function, batches:\n    pass")
    expect(lesson.run("exercise-one-step")).to_contain_text("Python could not read this cell")
    answer = solution(name, "one-step")
    lesson.write("exercise-one-step", answer.replace(" / len(batches)", ""))
    expect(lesson.run("exercise-one-step", "check-one-step")).to_contain_text("4 times too far")
    lesson.write("exercise-one-step", answer)
    expect(lesson.run("exercise-one-step", "check-one-step")).to_contain_text("Right.")


def test_lesson_09_as_a_learner(open_lesson: OpenLesson, shots: Path) -> None:
    name = "09_host"
    lesson = open_lesson(name)
    lesson.run("open-lesson", "figure")
    output = lesson.run("turn")
    picture = output.locator("img")
    expect(picture).to_be_visible()
    before = picture.get_attribute("src")
    output.locator(".widget-slider .noUi-handle, .widget-slider input").first.press("ArrowRight")
    expect(picture).not_to_have_attribute("src", before or "")
    lesson.notebook.screenshot(shots / "lesson-09-model.png", of=output)

    lesson.run("setup")
    answer = solution(name, "distances")
    lesson.write("exercise-distances", answer.replace(".sqrt()", ""))
    expect(lesson.run("exercise-distances", "check-distances")).to_contain_text("The square root is missing.")
    lesson.write("exercise-distances", answer)
    expect(lesson.run("exercise-distances", "check-distances")).to_contain_text(re.compile(r"Right\.|Undecided\."))


LEARNER = """
import os
os.environ["GPULAB_CLASS"], os.environ["GPULAB_DIR"] = {folder!r}, {own!r}
from gpulab.lessons import open_lesson
from gpulab.lessons.batch_size import check_accumulation
lesson = open_lesson("05")
lesson.name = {learner!r}
for _ in range(30):
    lesson.check("one-step")
lesson
"""
SOLVED = """
{solution}
lesson.check("one-step")
"""


def test_a_board_follows_three_kernels(open_notebook: OpenNotebook, tmp_path: Path, shots: Path) -> None:
    folder = tmp_path / "class"
    folder.mkdir(mode=0o700)
    answer = SOLVED.format(solution=solution("05_batch_size", "one-step"))
    names = ("Ada", "<script>alert(1)</script>", "Chen")
    folders = [str(tmp_path / f"learner-{i}" / "runs") for i in range(3)]  # a folder each, as on machines of their own
    cells = [
        LEARNER.format(folder=str(folder), own=own, learner=name) for own, name in zip(folders, names, strict=True)
    ]
    pages = [open_notebook([cell, answer]) for cell in cells]
    teacher = open_notebook(["%load_ext gpulab", f"%gpulab board {folder}", "%gpulab board --stop"])
    teacher.run_cell(0)
    board = teacher.run_cell(1)
    expect(board).to_contain_text("Nobody has opened a lesson yet.")
    for page in pages:
        page.start_cell(0)  # all three write at once
    expect(board).to_contain_text("3 learners")
    for page in pages:
        page.wait_finished(0)
        expect(page.output(0)).to_contain_text("This is a class")
        expect(page.run_cell(1)).to_contain_text("Right.")
    expect(board.get_by_text("✓", exact=True)).to_have_count(4)  # one for each, and the legend's
    expect(board.get_by_text("<script>alert(1)</script>")).to_be_visible()
    teacher.screenshot(shots / "board.png", of=board)
    teacher.run_cell(2)
    assert not [text for page in (teacher, *pages) for text in page.console if "alert" in text]
