"""A line for each check and guess: in the learner's folder, and in the class's; a place that fails stops nothing."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulab.lessons import progress
from gpulab.lessons.progress import ClassFolder, Learner, Line, Progress, class_outlets, learner, parsed, read_lines

WHEN = "2026-11-23T10:00:00+00:00"


def line(exercise: str = "loader", state: str = "right") -> Line:
    return Line("03_starving_gpu", exercise, "check", state, WHEN, 2.0, 2.4)


def test_lines_come_back_as_they_were_written(tmp_path: Path) -> None:
    mine = Progress(tmp_path / "new")
    assert mine.note(line()) == [] and mine.note(line(state="wrong")) == []
    assert mine.lines() == [line(), line(state="wrong")]
    assert "code" not in (tmp_path / "new" / "progress.jsonl").read_text()


def test_a_place_that_fails_is_named_once_and_again_later(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    mine = Progress(tmp_path / "file" / "below")
    [sentence] = mine.note(line())
    assert sentence.startswith("Your progress is not written to your progress file: ") and "goes on" in sentence
    assert mine.note(line()) == [], "said once"


def test_a_class_folder_that_comes_back_misses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "class"
    outlet = ClassFolder(folder, Learner("Ada <script>", "0a1b2c"))
    mine = Progress(tmp_path, (outlet,))
    [sentence] = mine.note(line("first"))
    assert str(folder) in sentence and not folder.exists(), "the instructor makes it, nobody else"
    folder.mkdir()
    assert mine.note(line("second")) == []
    [file] = folder.iterdir()
    assert file.name == "ada-script-0a1b2c.jsonl"
    lines = list(read_lines(file))
    assert [entry.exercise for entry in lines] == ["first", "second"]
    assert {entry.learner for entry in lines} == {"Ada <script>"}
    assert [entry.learner for entry in mine.lines()] == ["", ""], "the name is only for the class"


def test_without_the_variable_nothing_leaves_the_folder(tmp_path: Path) -> None:
    who = Learner("Ada", "0a1b2c")
    assert class_outlets(who, {}) == () and class_outlets(who, {"GPULAB_CLASS": " "}) == ()
    [outlet] = class_outlets(who, {"GPULAB_CLASS": str(tmp_path)})
    assert isinstance(outlet, ClassFolder) and outlet.folder == tmp_path


def test_a_learner_stays_who_they_are(tmp_path: Path) -> None:
    first = learner(tmp_path)
    assert first.name.startswith("learner ") and learner(tmp_path) == first
    renamed = learner(tmp_path, "Ada\n\x1b[31m  Lovelace " + "x" * 90)
    assert renamed.name.startswith("Ada [31m Lovelace xxx") and len(renamed.name) == 40
    assert renamed.token == first.token and learner(tmp_path) == renamed
    (tmp_path / "learner.json").write_text('{"token": "../..", "name": 7}')
    assert "/" not in learner(tmp_path).file_name


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"lesson": 3}', b'{"lesson": ""}', b'{"kind": "check"}', b"\xff\xfe", b'{"lesson": ["x"]}'],
)
def test_what_is_no_line_of_ours_is_left_out(content: bytes, tmp_path: Path) -> None:
    assert parsed(content) is None
    (tmp_path / "p.jsonl").write_bytes(content + b"\n" + json.dumps({"lesson": "03_x"}).encode() + b"\n")
    assert [entry.lesson for entry in read_lines(tmp_path / "p.jsonl")] == ["03_x"]


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=3))
def test_any_json_is_a_line_or_none(value: object) -> None:
    content = json.dumps({"lesson": "03", "guess": value, "time": str(value)})
    read = parsed(content)
    if read is None:
        assert value is not None
    else:
        assert read.guess is None or abs(read.guess) < 1e12
        assert read.moment is None or read.moment.tzinfo is not None


def _write_many(folder: Path, name: str) -> None:
    mine = Progress(folder)
    for i in range(200):
        mine.note(line(f"{name}-{i}"))


def test_two_notebooks_write_whole_lines_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(tmp_path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(Progress(tmp_path).lines()) == 400


def test_a_file_that_cannot_be_read_has_no_lines(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "none.jsonl")) == [] and list(read_lines(tmp_path)) == []
    long = json.dumps({"lesson": "03", "exercise": "x" * progress.LONGEST_LINE_BYTES})
    (tmp_path / "p.jsonl").write_text(long + "\n" + json.dumps({"lesson": "05"}) + "\n")
    assert [entry.lesson for entry in read_lines(tmp_path / "p.jsonl")] == ["05"]
