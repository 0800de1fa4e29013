"""The board in a notebook: it follows the folder, survives its loss, and is stopped."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gpulab.board import live
from gpulab.board.live import LiveBoard, read_folder, report, stop_boards, warning
from gpulab.errors import StoreError, UsageError
from gpulab.lessons.progress import ClassFolder, Learner, Line
from tests.support.commands import answered

WHEN = "2026-11-23T11:00:00+00:00"


def line(exercise: str, state: str = "right") -> Line:
    return Line("03_starving_gpu", exercise, "check", state, WHEN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ClassFolder(tmp_path, Learner("Ada", "000000")).write(line("loader"))
    return tmp_path


def test_a_terminal_gets_a_line_per_learner(folder: Path) -> None:
    assert "Ada" in answered(f"board {folder}")
    assert answered(f"board {folder} 05") == "Nobody has opened a lesson yet.\n"


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("", "needs the class folder"),
        ("--html", "--html: expected one argument"),
        ("/no/such/folder", "cannot be read"),
        (". 99", "There is no lesson '99'"),
        ("'", "no closing quotation"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(rest: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        answered(f"board {rest}")


def test_a_page_is_written_once(folder: Path, tmp_path: Path) -> None:
    assert "board page.html" in answered(f"board {folder} --html '{tmp_path / 'board page.html'}'")
    assert "Ada" in (tmp_path / "board page.html").read_text(encoding="utf-8")
    with pytest.raises(StoreError, match="cannot be written"):
        answered(f"board {folder} --html /no/such/folder/board.html")


class Handle:
    """Stands in for a display in a notebook."""

    def __init__(self) -> None:
        self.bundles: list[dict[str, str]] = []
        self.updated = threading.Event()

    def update(self, bundle: dict[str, str], raw: bool) -> None:
        self.bundles.append(bundle)
        self.updated.set()


def test_it_follows_the_folder_and_survives_its_loss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle()
    monkeypatch.setattr("IPython.display.display", lambda *args, **kwargs: handle)
    monkeypatch.setattr(live, "in_notebook", lambda: True)
    monkeypatch.setattr(live, "RENEWED_S", 0.02)
    before = {thread.ident for thread in threading.enumerate()}
    answered(f"board {folder}")
    ClassFolder(folder, Learner("Ben", "111111")).write(line("enough-workers"))
    wait_for(handle, "Ben")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    wait_for(handle, "cannot be read")
    folder.mkdir()
    wait_for(handle, "Nobody has opened a lesson yet.")
    answered("board --stop")
    stop_boards()
    for thread in threading.enumerate():
        if thread.ident not in before:
            thread.join(5)
    assert {thread.ident for thread in threading.enumerate()} <= before


def wait_for(handle: Handle, words: str) -> None:
    for _ in range(1000):
        if any(words in value for bundle in handle.bundles[-1:] for value in bundle.values()):
            return
        handle.updated.wait(5)
        handle.updated.clear()
        time.sleep(0.01)
    raise AssertionError(f"{words!r} was never shown")


def test_links_and_other_files_are_not_read(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "secret.jsonl"
    elsewhere.write_text(json.dumps({"lesson": "03_starving_gpu", "learner": "Eve"}))
    (folder / "eve.jsonl").symlink_to(elsewhere)
    (folder / "notes.txt").write_text("x")
    (folder / "dir.jsonl").mkdir()
    assert list(read_folder(folder)) == ["ada-000000"]


def test_an_unsafe_folder_is_named(folder: Path) -> None:
    folder.chmod(0o777)
    assert "chmod +t" in warning(folder) and "chmod +t" in LiveBoard(folder, ()).bundle()["text/html"]
    folder.chmod(0o1777)
    assert warning(folder) == ""


def test_a_learner_sees_their_own_progress() -> None:
    guess: dict[str, Any] = {"guess": 3.0, "measured": 2.0}
    lines = [line("loader", "wrong"), line("loader"), Line("03_starving_gpu", "workers", "guess", "far", WHEN, **guess)]
    said = "\n".join(report(lines))
    assert said.startswith("1 of ") and "exercise loader: solved (checked 2 times)" in said
    assert "exercise enough-workers: not begun" in said and "you guessed 3, measured was 2" in said
