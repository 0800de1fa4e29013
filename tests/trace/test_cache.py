"""A trace that was read before opens as it was read, and only as long as it is the same file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import gpulab
from gpulab.run import Run
from gpulab.trace import files, load
from tests.support import trace_files as made
from tests.support.strategies import assert_same

TEXT = made.text([*made.step(3), *made.step(4, 1000.0)])


@pytest.fixture(autouse=True)
def small_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CACHED_FROM_BYTES", 1)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were really read."""
    read: list[Path] = []

    def reading(path: Path, *more: object) -> Run:
        read.append(path)
        return load.load_run(path)

    monkeypatch.setattr(files, "load_run", reading)
    return read


def opened(path: Path) -> Run:
    run = gpulab.load(path)
    assert isinstance(run, Run)
    return run


def test_a_file_is_read_once(tmp_path: Path, readings: list[Path]) -> None:
    path = made.write(tmp_path, TEXT)
    assert files.cached(path) is None
    first = opened(path)
    assert files.cached(path) is not None
    assert_same(first, opened(path))
    assert readings == [path]


def test_a_folder_of_ranks_is_read_once(tmp_path: Path, readings: list[Path]) -> None:
    for rank in range(2):
        made.write(tmp_path, made.text(made.step(3), distributedInfo={"rank": rank, "world_size": 2}), f"r{rank}.json")
    gpulab.load(tmp_path)
    gpulab.load(tmp_path)
    assert len(readings) == 2


def test_a_changed_file_is_read_again(tmp_path: Path, readings: list[Path]) -> None:
    path = made.write(tmp_path, TEXT)
    opened(path)
    before = os.stat(path)
    path.write_text(TEXT.replace("volta", "turing"))  # one sign longer
    assert any("turing" in name for name in opened(path).timeline.names)  # type: ignore[union-attr]
    path.write_text(TEXT.replace("volta", "amper"))  # as long as the first
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # and as old: its last change is not
    assert any("amper" in name for name in opened(path).timeline.names)  # type: ignore[union-attr]
    assert len(readings) == 3


def test_what_a_run_says_of_its_file_is_of_this_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made.write(tmp_path, TEXT, "first.json")
    assert opened(path).id == "first"
    os.rename(path, tmp_path / "second.json")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run = opened(Path("second.json"))
        assert run.id == "second" and run.origin is not None and run.origin.path == "second.json"


def test_what_is_not_kept_is_read_again(tmp_path: Path, readings: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = made.write(tmp_path, TEXT)
    with monkeypatch.context() as patch:
        patch.setattr(files, "CACHED_FROM_BYTES", 1 << 20)
        first = opened(path)
        assert not files.cache_folder().exists(), "a small file"
    (tmp_path / "file").write_text("in the way")
    with monkeypatch.context() as patch:
        patch.setenv("GPULAB_CACHE_DIR", str(tmp_path / "file"))
        assert_same(first, opened(path))
    opened(path)
    monkeypatch.setattr(files, "_READERS", ("run.py",))  # other files than before: gpulab was updated
    opened(path)
    assert len(readings) == 4


@pytest.mark.parametrize("file", ["run.json", "columns.tables"])
@pytest.mark.parametrize("content", [b"", b"{}", b"no run"])
def test_what_is_damaged_is_read_again(tmp_path: Path, readings: list[Path], file: str, content: bytes) -> None:
    path = made.write(tmp_path, TEXT)
    first = opened(path)
    (kept,) = files.cache_folder().iterdir()
    (kept / file).write_bytes(content)
    assert_same(first, opened(path))
    assert_same(first, opened(path))
    assert len(readings) == 2


def test_what_was_not_opened_for_longest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [made.write(tmp_path, TEXT, f"{name}.json") for name in "abc"]
    for moment, path in enumerate(paths[:2]):
        opened(path)
        (new,) = [f for f in files.cache_folder().iterdir() if f.stat().st_mtime > 1e9]
        os.utime(new, (moment, moment))
    opened(paths[0])  # as it was kept: the other one is the oldest now
    (kept, _) = sorted(files.cache_folder().iterdir(), key=lambda f: -f.stat().st_mtime)
    size = sum(f.stat().st_size for f in kept.iterdir())
    monkeypatch.setattr(files, "MOST_BYTES", int(2.5 * size))
    opened(paths[2])
    assert [files.cached(path) is not None for path in paths] == [True, False, True]
    assert not [f for f in files.cache_folder().iterdir() if f.name.startswith(".")]


def test_the_place_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPULAB_CACHE_DIR")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert files.cache_folder() == Path("/somewhere/gpulab/traces")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.cache_folder() == Path.home() / ".cache" / "gpulab" / "traces"
