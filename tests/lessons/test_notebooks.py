"""Every lesson runs from top to bottom without a person; its exercises fail before, and pass with their solutions."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import jupytext
import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from gpulab.lessons.catalogue import LESSONS, Entry
from gpulab.lessons.editions import EXERCISE, cell_name, edition, solutions, source
from gpulab.lessons.lesson import Lesson, exercises_of, shipped_figures
from gpulab.lessons.progress import Progress
from gpulab.options import QUICK_VARIABLE
from tests.lessons.notebook_kernel import (
    LEFT_BEHIND,
    LONG_S,
    MOST_BYTES,
    NOTEBOOKS,
    Kernel,
    binder_environment,
    install_kernel,
    shipped,
)
from tests.lessons.whole import files_of, whole_lessons
from tests.support.changes import in_turn, is_due
from tests.support.fork_server import EXECUTABLE, python_with_torch
from tests.support.paths import ROOT

TEXTS = NOTEBOOKS / "lessons"
LARGEST_BYTES = 1_000_000
LONGEST_RUN_S = 120
MOST_COLUMNS = 96  # what JupyterLab shows of a line of code beside its file browser on a screen of 1280 points
BY_HAND = {
    "enough-workers",
    "enough-batch",
    "worst",
    "cheaper",
    "order",
    "micro-batches",
}  # the answer is a figure of the reader's own run
OPTIONAL = ("torch_tb_profiler", "h5py", "optuna")
ASSERTED = {  # of what a lesson has measured, in its own kernel after its last cell
    "06_memory": """
from gpulab.lessons.measured import latest_run

account = latest_run("watched").memory_account
for growth in (account.rerun, *account.growth):  # a quick run is too short for growth per step
    assert (growth.owner, growth.line) == ("features", "line 8: features.append(hidden)")
assert 5 < lesson.reveal("kept").measured < 25
assert not lesson.check("free").hint.startswith("features still")
""",
    "12_split_model": """
from gpulab.lessons import split_model
from gpulab.lessons.measured import latest_ranks

names = ("one-micro-batch", "eight-micro-batches", "one-forward-one-backward")
assert lesson.reveal("kept").measured == 25  # 1F1B: of eight micro-batches two
assert [split_model.micro_batches_of(run) for name in names for run in latest_ranks(name)] == [1, 1, 8, 8, 8, 8]
lines = [line.split() for line in bubbles(*names, "another").lines]
assert [line[:3] for line in lines[1:4]] == [[names[0], "2", "1"], [names[1], "2", "8"], [names[2], "2", "8"]]
assert [line[3:5] for line in lines[1:4]] == [["50", "%"], ["11", "%"], ["11", "%"]]
assert lines[4] == ["another", "has", "not", "run", "yet"]
assert split_model.measured_bubble("one-micro-batch") > 0.4  # by the order of work, not by speed
import gpulab
report = gpulab.report(gpulab.api.reading.open_run("eight-micro-batches")).json()
assert report["straggler"] is None and "messages" in report["mismatch"]
""",
}

lessons = pytest.mark.parametrize("entry", LESSONS, ids=lambda entry: entry.name)


@pytest.fixture(scope="module")
def execute_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("execute_notebooks", NOTEBOOKS / "execute.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parts(entry: Entry) -> ModuleType:
    return importlib.import_module(f"gpulab.lessons.{entry.module}")


def test_every_text_is_a_lesson_of_the_catalogue() -> None:
    assert {path.stem for path in TEXTS.glob("*.md")} == {entry.name for entry in LESSONS}
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {entry.name for entry in LESSONS}


@lessons
def test_a_notebook_is_what_its_text_says(entry: Entry, execute_script: ModuleType) -> None:
    made = execute_script.notebook_of(TEXTS / f"{entry.name}.md")
    there = shipped(entry.name)
    assert [(c.cell_type, c.id, c.source) for c in there.cells] == [
        (c.cell_type, c.id, c.source) for c in made.cells
    ], f"run make notebooks LESSON={entry.number}"


@lessons
def test_a_shipped_notebook_was_run_and_is_small(entry: Entry) -> None:
    notebook = shipped(entry.name)
    assert (NOTEBOOKS / f"{entry.name}.ipynb").stat().st_size <= LARGEST_BYTES
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert notebook.metadata["gpulab"]["run_all_s"] <= LONGEST_RUN_S, "on the machine that it was shipped from"
    kinds = {kind for c in notebook.cells for o in c.get("outputs", ()) for kind in o.get("data", {})}
    assert not [kind for kind in kinds if "widget" in kind or "javascript" in kind]
    assert "widgets" not in notebook.metadata
    content = (NOTEBOOKS / f"{entry.name}.ipynb").read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|work)/", content), "no path of the machine that ran it"


@lessons
def test_no_line_of_code_is_cut_off(entry: Entry) -> None:
    for cell in shipped(entry.name).cells:
        if cell.cell_type == "code":
            assert [line for line in source(cell).splitlines() if len(line) > MOST_COLUMNS] == [], cell_name(cell)


@lessons
def test_cells_and_module_name_the_same_things(entry: Entry) -> None:
    text = "\n".join(source(cell) for cell in shipped(entry.name).cells)
    names = [cell_name(cell) for cell in shipped(entry.name).cells if cell.cell_type == "code"]
    assert len(names) == len(set(names))
    asked = set(re.findall(r'lesson\.guess\("([\w-]+)"\)', text))
    assert (
        asked == set(re.findall(r'lesson\.reveal\("([\w-]+)"\)', text)) == set(getattr(parts(entry), "QUESTIONS", {}))
    )
    exercises = set(exercises_of(entry))
    assert set(re.findall(r'lesson\.check\("([\w-]+)"\)', text)) == exercises
    assert {f"check-{name}" for name in exercises} | {f"{EXERCISE}{name}" for name in exercises} <= set(names)
    assert set(solutions(shipped(entry.name))) == exercises - BY_HAND
    for name in exercises & BY_HAND:
        assert "<details>" in explained(entry, name), f"how the answer to {name} is read"
    assert {f"guess-{name}" for name in asked} | {f"reveal-{name}" for name in asked} <= set(names)


def explained(entry: Entry, exercise: str) -> str:
    """The text after an exercise's check, up to the next code."""
    cells = shipped(entry.name).cells
    following = cells[next(i for i, c in enumerate(cells) if cell_name(c) == f"check-{exercise}") + 1 :]
    return "\n".join(source(c) for c in takewhile(lambda c: c.cell_type == "markdown", following))


@lessons
def test_the_editions_differ_in_the_solutions_alone(entry: Entry) -> None:
    notebook = json.loads((NOTEBOOKS / f"{entry.name}.ipynb").read_text(encoding="utf-8"))
    assert edition(notebook, "self-study") == notebook
    for_class, for_instructor = edition(notebook, "class"), edition(notebook, "instructor")
    for made in (for_class, for_instructor):
        nbformat.validate(nbformat.from_dict(made))
        assert "<details>" not in "".join(source(cell) for cell in made["cells"])
    answers = solutions(notebook)
    in_class = "\n".join(source(cell) for cell in for_class["cells"])
    cells = {cell_name(cell): source(cell) for cell in for_instructor["cells"]}
    for name, code in answers.items():
        assert code not in in_class
        assert cells[f"{EXERCISE}{name}"].endswith(code)


@pytest.fixture(scope="session")
def share(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where Jupyter finds the kernels of this process of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("share")
        patch.setenv("JUPYTER_PATH", str(folder))
        yield folder


@pytest.fixture(scope="session")
def binder(share: Path) -> Iterator[Kernel]:
    """Each lesson as long as its reader has it; in Binder's environment where that changed, else in the tests' own."""
    python = Path(sys.executable)
    if is_due("binder/", "constraints.txt", "pyproject.toml"):
        python = binder_environment(Path(sys.prefix) / "share") / "bin" / "python"
    install_kernel("gpulab-binder", str(python), share)
    with closing(Kernel("gpulab-binder")) as kernel:
        yield kernel


@pytest.fixture(scope="session")
def quick(share: Path) -> Iterator[Kernel]:
    """The tests' own environment, and nothing measured for longer than it takes to run every line."""
    install_kernel("gpulab-quick", sys.executable, share, {QUICK_VARIABLE: "1", EXECUTABLE: python_with_torch()})
    with closing(Kernel("gpulab-quick")) as kernel:
        yield kernel


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(e, id=e.name, marks=() if e.name in whole_lessons() else in_turn(i, *files_of(e), of=3))
        for i, e in enumerate(LESSONS)
    ],
)
@pytest.mark.timeout(LONG_S + 600)
@pytest.mark.slow("every cell of a lesson, as short as GPULAB_QUICK makes it; two of them whole")
def test_a_lesson_runs_on_binder_and_takes_its_solutions(
    entry: Entry,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    """What changed and one in rotation as readers have it; of all others every third, quickly."""
    is_whole = entry.name in whole_lessons()
    kernel: Kernel = request.getfixturevalue("binder" if is_whole else "quick")
    if is_whole:  # a new process: its memory is this lesson's
        kernel.close()
    answers = solutions(shipped(entry.name))
    last = cell_name(shipped(entry.name).cells[-1])
    further = [(last, "left-behind", LEFT_BEHIND), (last, "asserted", ASSERTED.get(entry.name, ""))]
    for name, code in answers.items():
        further.append((f"check-{name}", f"solution-{name}", code))
        further.append((f"solution-{name}", f"solved-{name}", f'lesson.check("{name}")'))
    shown = kernel.execute(shipped(entry.name), tmp_path, further)
    record_property("peak_bytes", shown.peak_bytes)
    for name, outputs in shown.texts.items():
        said = outputs[-1] if outputs else ""  # torch may warn before it
        if name.startswith("check-"):
            assert said.startswith("Not answered yet. "), (name, said)
        elif name.startswith("solved-"):
            record_property(name, said)
            assert said.startswith(("Right. ", "Undecided. ")), (name, said)  # how fast it was, a busy machine may hide
        elif name.startswith("reveal-"):
            assert said.startswith(("No guess. Measured: ", "Undecided. ")), (name, said)
    assert shown.texts["left-behind"] == ["[]\n"]
    assert not is_whole or shown.peak_bytes <= MOST_BYTES, f"{shown.peak_bytes / 1e9:.2f} GB"


def test_binders_python_and_torch_are_those_that_gpulab_takes() -> None:
    environment = (ROOT / "binder" / "environment.yml").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = re.search(r"- python=([\d.]+)\n", environment)
    torch = re.search(r"- pytorch-cpu(\S+)\n", environment)
    assert python is not None and torch is not None, "repo2docker's own Python is older"
    assert python[1] in SpecifierSet(project["requires-python"])
    needed = next(Requirement(line).specifier for line in project["dependencies"] if line.startswith("torch"))
    assert str(needed) in torch[1].split(",")


def test_the_readmes_say_what_each_lesson_measured(execute_script: ModuleType) -> None:
    for readme, lessons in execute_script.READMES.items():
        text = readme.read_text(encoding="utf-8")
        assert execute_script.BEGIN in text
        assert execute_script.listed(text, lessons) == text, "run make notebooks"
    assert execute_script.FIGURES.read_text(encoding="utf-8") == execute_script.figures(), "run make notebooks"
    for entry in LESSONS:
        assert shipped_figures()[entry.name].keys() <= getattr(parts(entry), "QUESTIONS", {}).keys()


def test_the_texts_are_jupytexts_own(tmp_path: Path) -> None:
    """Written by jupytext again, a text stays as it is: who edits in JupyterLab changes no other line."""
    for path in sorted(TEXTS.glob("*.md")):
        again = jupytext.writes(jupytext.read(path), fmt="md:myst")
        cells = [(c.cell_type, c.source) for c in jupytext.reads(again, fmt="md:myst").cells]
        assert cells == [(c.cell_type, c.source) for c in jupytext.read(path).cells]


def test_a_cell_without_its_package_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {}
    for entry in LESSONS:
        for cell in shipped(entry.name).cells:
            if package := re.search(r'^if lesson\.has\("(\w+)"\)', source(cell), re.MULTILINE):
                names: dict[str, object] = {"storage": ""}
                names["lesson"] = Lesson(entry, names, Progress(outlets=()))
                monkeypatch.setattr(f"{Lesson.__module__}.importlib.util.find_spec", lambda name: None)
                exec(source(cell), names)  # which has no other name: nothing else of it runs
                asked[package[1]] = capsys.readouterr().out
    assert {name: f"%pip install {name} in" in said for name, said in asked.items()} == dict.fromkeys(OPTIONAL, True)


def test_links_between_notebooks_lead_somewhere() -> None:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        text = "\n".join(source(cell) for cell in shipped(path.stem).cells if cell.cell_type == "markdown")
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (NOTEBOOKS / target).exists(), (path.name, target)
    assert (ROOT / "notebooks" / "README.md").exists()
