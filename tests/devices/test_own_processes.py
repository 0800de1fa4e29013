"""What gpulab starts for itself finds gpulab, and is in no count and no sum of the profiled program."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import gpulab
from gpulab.devices.meters import host_meter
from gpulab.devices.own_processes import import_path, is_gpulabs, marked

_WITH_A_CHILD = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'print(1, flush=True); input()'], "
    "stdin=subprocess.PIPE); sys.stdin.read(); p.communicate()"
)
_PACKAGE = Path(gpulab.__file__).parent
_USERS = ("cli/ranks.py", "launch/launcher.py", "lessons/sharing.py")  # they start the user's own code
_OF_THE_USER = {_PACKAGE / path for path in _USERS}
_SOURCES = sorted(set(_PACKAGE.rglob("*.py")) - _OF_THE_USER)


@contextmanager
def family(environment: dict[str, str]) -> Iterator[int]:
    """A process and a child of that process, both running Python by now; the id of the first."""
    command = [sys.executable, "-c", _WITH_A_CHILD]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None and parent.stdout.readline()
    try:
        yield parent.pid
    finally:
        parent.communicate()


def process_count() -> float | None:
    return host_meter(os.getpid(), 1.0).read()[2]


def test_gpulabs_own_processes_are_not_counted() -> None:
    before = process_count()
    assert before is not None
    with family(marked()) as pid:
        assert is_gpulabs(pid)
        assert process_count() == before
    with family(dict(os.environ)) as pid:
        assert not is_gpulabs(pid)
        assert process_count() == before + 2


@pytest.mark.parametrize("path", _SOURCES, ids=lambda p: p.name)
def test_every_process_that_gpulab_starts_is_marked(path: Path) -> None:
    for call in ast.walk(ast.parse(path.read_text())):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("subprocess.Popen", "subprocess.run"):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert given.get("env", "").startswith("marked("), f"{path.name}, line {call.lineno}"


CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import gpulab; print(gpulab.__file__)"


def test_a_child_in_another_folder_imports_this_gpulab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(gpulab.__file__).resolve()
    elsewhere = [p for p in sys.path if p and Path(p).resolve() != here.parents[1]]
    monkeypatch.setattr(sys, "path", elsewhere)
    order = [sys.executable, "-S", "-P", "-c", CHILD, json.dumps(import_path())]
    assert Path(subprocess.check_output(order, text=True, cwd=tmp_path).strip()).resolve() == here
    monkeypatch.setattr(sys, "path", ["", "lib"])
    assert import_path()[:2] == [os.getcwd(), "lib"], "the current folder is named in full"
