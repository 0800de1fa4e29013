"""A Python that gpulab starts finds gpulab, wherever it runs and wherever the module that starts it stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpulab
from gpulab.devices.own_processes import import_path

CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import gpulab; print(gpulab.__file__)"


def test_a_child_in_another_folder_imports_this_gpulab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(str(gpulab.__file__)).resolve().parents[1]
    elsewhere = [p for p in sys.path if p and Path(p).resolve() != root]
    monkeypatch.setattr(sys, "path", elsewhere)
    order = [sys.executable, "-S", "-P", "-c", CHILD, json.dumps(import_path())]
    done = subprocess.run(order, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert Path(done.stdout.strip()).resolve() == Path(str(gpulab.__file__)).resolve()


def test_the_current_folder_is_named_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", "lib"])
    assert import_path()[:2] == [os.getcwd(), "lib"]
