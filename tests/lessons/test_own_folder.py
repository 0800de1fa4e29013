"""`gpulab lab`: a copy of the lessons that belongs to the learner."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from gpulab import cli
from gpulab.errors import StoreError, UsageError
from gpulab.lessons import editions
from gpulab.lessons.editions import copy_lessons, jupyterlab_command, notebooks


@pytest.fixture(autouse=True)
def anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who runs the tests may be root."""
    monkeypatch.setattr(editions, "_is_superuser", lambda: False)


def test_a_learners_notebook_is_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    first = copy_lessons(folder)
    assert first.present == () and set(first.new) == {path.stem for path in notebooks()}
    (folder / "03_starving_gpu.ipynb").write_text("mine")
    (folder / "05_batch_size.ipynb").unlink()
    assert cli.main(["lab", "--folder", str(folder), "--no-open"]) == 0
    assert (folder / "03_starving_gpu.ipynb").read_text() == "mine"
    said = capsys.readouterr().out
    assert said.startswith("1 lesson copied to ") and "kept: your copies are never overwritten" in said


def test_a_copy_holds_no_output_that_tells_the_answer(tmp_path: Path) -> None:
    copy_lessons(tmp_path)
    for source in notebooks():
        shipped, copy = (nbformat.read(path, as_version=4) for path in (source, tmp_path / source.name))
        assert [cell.source for cell in copy.cells] == [cell.source for cell in shipped.cells]
        code = [cell for cell in copy.cells if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in code)
        nbformat.validate(copy)


def test_root_is_told_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(editions, "_is_superuser", lambda: True)
    assert cli.main(["lab", "--folder", str(tmp_path)]) == 2
    assert "gpulab lab -- --allow-root" in capsys.readouterr().err
    assert jupyterlab_command(tmp_path, "03_starving_gpu", ["--allow-root"])[-1] == "--allow-root"


def test_a_class_gets_no_solutions(tmp_path: Path) -> None:
    copy_lessons(tmp_path, "class")
    assert "<details>" not in (tmp_path / "03_starving_gpu.ipynb").read_text()
    copy_lessons(tmp_path / "i", "instructor")
    cells = json.loads((tmp_path / "i" / "03_starving_gpu.ipynb").read_text())["cells"]
    assert any("# a solution\n" in "".join(cell["source"]) for cell in cells)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be copied to"):
        copy_lessons(tmp_path / "file" / "below")


def test_without_lessons_both_places_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(editions, "PACKAGE_FOLDER", tmp_path / "gpulab")
    monkeypatch.setattr(editions, "INSTALLED", "share/no-such-folder")
    with pytest.raises(UsageError, match="no-such-folder"):
        notebooks()


def test_the_lesson_that_was_asked_for_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "call", lambda command, cwd: calls.append(command) or 0)  # type: ignore[func-returns-value]
    assert cli.main(["lab", "--lesson", "3", "--folder", str(tmp_path), "--", "--no-browser"]) == 0
    [command] = calls
    assert command[:4] == [sys.executable, "-m", "jupyter", "lab"] and command[-1] == "--no-browser"
    assert "--LabApp.default_url=/lab/tree/03_starving_gpu.ipynb" in command


@pytest.mark.parametrize(
    ("words", "said"), [(["--lesson", "99"], "no lesson '99'"), (["--edition", "x"], "invalid choice: 'x'")]
)
def test_a_wrong_word_is_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_jupyterlab_its_command_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'gpulab\[demo,lab\]'"):
        jupyterlab_command(tmp_path, "03_starving_gpu", [])
