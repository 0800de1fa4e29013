"""The proof that nothing is left behind can fail: every sort is found, also after the first import of torch.

A frame of gpulab's in a traceback is found too, and no other frame is taken for one.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from IPython.core.ultratb import FormattedTB

import gpulab
from gpulab.capture import torch_hooks
from gpulab.errors import GpulabError
from tests.support import leftovers
from tests.support.fork_server import python_with_torch
from tests.support.paths import TESTS

PACKAGE = Path(gpulab.__file__).parent

LEAKS = """
import subprocess, sys, threading
import conftest, torch
import gpulab
from gpulab.patching.attributes import before_calls
conftest.PATIENCE_S = 0.0

kept = []

def leak(owner, name):
    kept.append(before_calls(owner, name, print))
    kept[-1].__enter__()

def test_listed():
    leak(torch.autograd, "grad")

def test_hook():
    torch.nn.modules.module.register_module_forward_pre_hook(gpulab.load)

def test_thread():
    threading.Thread(target=threading.Event().wait, name="gpulab-test", daemon=True).start()

def test_process():
    command = [sys.executable, "-c", "import sys; sys.stdin.read()  # gpulab.capture"]
    sys.child = subprocess.Popen(command, stdin=subprocess.PIPE)

def test_file(tmp_path):
    sys.opened = open(tmp_path / "file", "w")

def test_profiler():
    torch.profiler.profile().__enter__()

def test_innocent():
    pass

def test_unlisted():
    leak(torch.Tensor, "tolist")
"""
LEFT = {
    "test_listed": "by the test: ['patch of torch.autograd.grad']",
    "test_hook": "by the test: ['hook in _global_forward_pre_hooks']",
    "test_thread": "by the test: ['thread gpulab-test']",
    "test_process": "by the test: ['process ",
    "test_file": "by the test: ['open file ",
    "test_profiler": "by the test: ['a torch.profiler is active']",
    "test_unlisted": "by test_leaks.py: ['patch of Tensor.tolist']",
}


def test_each_kind_of_leak_counts_against_its_test_alone(tmp_path: Path) -> None:
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-p", "conftest"]
    done = subprocess.run(
        [python_with_torch(), *words, "-c", "/dev/null", "test_leaks.py"],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "500", "PYTHONPATH": f"{TESTS}:{TESTS.parent}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"8 passed, {len(LEFT)} errors" in done.stdout, done.stdout + done.stderr
    for test, words_said in LEFT.items():
        (line,) = re.findall(rf"^ERROR test_leaks.py::{test} - (.*)$", done.stdout, re.MULTILINE)
        assert f"left behind {words_said}" in line


def test_the_table_has_all_that_the_package_replaces() -> None:
    """Besides where the name is computed: from a table there, which is read, or which is here."""
    names, computed = set[str](), set[str]()
    for path in PACKAGE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("replaced", "before_calls"):
                name = call.args[1]
                names |= {str(name.value)} if isinstance(name, ast.Constant) else set()
                computed |= set() if isinstance(name, ast.Constant) else {path.name}
    assert names <= {name for functions in leftovers.replaced().values() for name in functions}
    assert computed == {"torch_hooks.py", "agreement.py", "attributes.py"}


def test_every_hook_and_patch_of_a_run_is_found() -> None:
    with ExitStack() as undo:
        torch_hooks.install(Mock(), undo)
        torch_hooks.install_pauses(Mock(), Mock(), undo)
        found = leftovers.leftovers(sweep=False)
        assert set(found) == set(leftovers.leftovers())
    assert {
        "patch of DataLoader.__iter__",
        "patch of _BaseDataLoaderIter.__next__",
        "patch of GradScaler.step",
        "patch of torch.autograd.backward",
        "patch of torch.compile",
        "patch of torch.save",
        "patch of os.fsync",
        "patch of no_grad.__enter__",
        "hook in _global_optimizer_pre_hooks",
        "hook in _global_optimizer_post_hooks",
        "hook in _global_forward_pre_hooks",
    } <= set(found)
    assert leftovers.leftovers() == []


@pytest.mark.parametrize("home", ["/nowhere", str(PACKAGE.parent), str(PACKAGE.parents[1])])
def test_a_frame_of_ours_is_found_in_a_traceback(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    with pytest.raises(GpulabError) as caught:
        gpulab.load("absent.json")
    shown = FormattedTB(mode="Context").text(type(caught.value), caught.value, caught.value.__traceback__)
    assert leftovers.own_frames(caught.value) and leftovers.own_frames(shown)
    assert ("~" in leftovers.own_frames(shown)[0]) == (home != "/nowhere")


@pytest.mark.parametrize("folder", [PACKAGE.parent / ".venv" / "lib", PACKAGE.with_name("gpulab_cells")])
def test_a_library_below_a_folder_named_gpulab_is_not_ours(folder: Path) -> None:
    scope: dict[str, Any] = {}
    exec(compile("def fail():\n    1 / 0", str(folder / "library.py"), "exec"), scope)
    with pytest.raises(ZeroDivisionError) as caught:
        scope["fail"]()
    assert str(folder) in "".join(traceback.format_exception(caught.value))
    assert not leftovers.own_frames(caught.value) and not leftovers.is_own_code(scope["fail"])
    assert leftovers.is_own_code(gpulab.load)
