"""Recordings open as any run does; what is not there is named with the nearest, and nothing is ever unpickled."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

import gpulab
from gpulab import recordings
from gpulab.errors import StoreError
from gpulab.run import Run
from gpulab.store.folders import DOCUMENT, Store
from tests.support import synthetic


def recorded(root: Path, name: str, run: Run) -> Path:
    """A run in the place of a recording."""
    folder = root / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    named = replace(run, settings=replace(run.settings, name=folder.name))
    Store(root / "stage").save(named).rename(folder)
    shutil.rmtree(root / "stage")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run = synthetic.gpu_case().facts.run
    recorded(tmp_path, "h200/workers-0", run)
    recorded(tmp_path, "h200/workers-8", replace(run, id="another"))
    recorded(tmp_path, "h100/workers-0", replace(run, id="a-third"))
    return tmp_path


def test_names_are_machine_and_cell(root: Path) -> None:
    (root / "h200" / ".collecting-x").mkdir()
    (root / "h200" / ".collecting-x" / DOCUMENT).write_text("{}")
    assert recordings.names(root) == ["h100/workers-0", "h200/workers-0", "h200/workers-8"]
    assert recordings.machine_with("workers-0", root=root) == "h100"
    assert recordings.machine_with("workers-0", "workers-8", root=root) == "h200"
    assert recordings.machine_with("workers-9", root=root) is None


def test_a_recording_is_a_run(root: Path) -> None:
    run = recordings.open("h200/workers-0", root)
    assert run.name == "workers-0" and run.device.kind == "cuda" and run.timeline is not None
    assert run.device.name in gpulab.report(run).text()
    compared = gpulab.compare(run, recordings.open("h200/workers-8", root))
    assert "workers-8" in str(compared)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("h200/worker-8", "There is no recording 'h200/worker-8'. Did you mean 'h200/workers-8'?"),
        ("workers-8", "Did you mean 'h200/workers-8'?"),
        ("../h200/workers-0", "Did you mean 'h200/workers-0'?"),
        ("???", "There are: h100/workers-0, h200/workers-0, h200/workers-8."),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(root: Path, asked: str, words: str) -> None:
    with pytest.raises(StoreError, match=re.escape(words)):
        recordings.open(asked, root)


def test_without_any_the_command_that_makes_them_is_named(tmp_path: Path) -> None:
    assert recordings.names(tmp_path / "nowhere") == []
    with pytest.raises(StoreError, match=r"comes without recordings; .* make record-gpu"):
        recordings.open("h200/workers-0", tmp_path)


def test_what_gpulab_ships_can_be_read_and_is_small() -> None:
    for name in recordings.names():
        recordings.open(name).check()
    assert sum(file.stat().st_size for file in recordings.DATA.rglob("*") if file.is_file()) <= 20_000_000
