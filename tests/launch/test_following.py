"""What a script starts itself is recorded where it is a rank, and left as it is where not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpulab.launch.own_ranks import FOLLOW, followed_ranks
from gpulab.store.folders import Store
from tests.support.fork_server import python_with_torch


def test_other_processes_are_left_as_they_are(tmp_path: Path, own_store: Path) -> None:
    (tmp_path / "tool.py").write_text("import os, sys; print('tool', sys.argv[1:], os.environ.get('LOCAL_RANK'))")
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.of_the_user = 5")
    script = """
import os, subprocess, sys
os.environ["PYTHONPATH"] += os.pathsep + os.path.dirname(__file__)
for more in ({}, {"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"}):
    subprocess.run([sys.executable, os.path.join(os.path.dirname(__file__), "tool.py"), "7"], env=os.environ | more)
    subprocess.run([sys.executable, "-c", "print(of_the_user)"], env=os.environ | more)
"""
    (tmp_path / "train.py").write_text(script)
    command = [python_with_torch(), "-m", "gpulab", "record", "--no-live", str(tmp_path / "train.py")]
    said = subprocess.run(command, capture_output=True, text=True, env=os.environ.copy())
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("tool ['7']") == 3 and said.stdout.count("5\n") == 3, said.stdout
    assert len(Store(own_store / "runs").list()) == 2, "the script, and what says that it is rank 1"


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"PYTHONPATH": "/a", "HOME": "/h"}
    environment = dict(before)
    with followed_ranks(["--no-live"], {"JOB": "job"}, environment):
        assert environment[FOLLOW] == "--no-live" and environment["JOB"] == "job"
        assert environment["PYTHONPATH"].endswith("follow:/a")
    assert environment == before
    rank = before | {"LOCAL_RANK": "0"}
    with followed_ranks(["--no-live"], {"JOB": "job"}, rank):
        assert FOLLOW not in rank


def test_a_path_that_the_code_sets_itself_stays() -> None:
    environment = {"PYTHONPATH": "/a"}
    with followed_ranks([], {}, environment):
        environment["PYTHONPATH"] += os.pathsep + "/b"
    assert environment == {"PYTHONPATH": os.pathsep.join(("/a", "/b"))}
    with followed_ranks([], {}, environment):
        del environment["PYTHONPATH"]
    assert environment == {}
    with followed_ranks([], {}, environment):
        assert environment["PYTHONPATH"].endswith("follow")
    assert environment == {}
