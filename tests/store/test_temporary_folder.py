"""Temporary folders: gone afterwards, and those of killed processes gone when the next one is made."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gpulab.store.files import temporary_folder

HOLDS = """
import sys, time
from gpulab.store.files import temporary_folder
with temporary_folder("gpulab-trial-") as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_it_is_gone_afterwards(tmp_path: Path) -> None:
    def fail() -> None:
        with temporary_folder("gpulab-trial-") as folder:
            (folder / "file").touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(tmp_path.iterdir())


def test_of_a_killed_process_it_goes_with_the_next(tmp_path: Path) -> None:
    (tmp_path / "gpulab-trial-just-made").mkdir()
    (tmp_path / "gpulab-other").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        held = Path(process.stdout.readline().strip())
        with temporary_folder("gpulab-trial-") as own:
            assert held.is_dir(), "its process is there"
        process.send_signal(signal.SIGKILL)
    assert held.is_dir()
    with temporary_folder("gpulab-trial-") as own:
        assert own.is_dir() and not held.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"gpulab-trial-just-made", "gpulab-other"}
