"""The proof that nothing is left behind can fail: every sort is found, also after the first import of torch.

A frame of gpulab's in a traceback is found too, and no other frame is taken for one.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from IPython.core.ultratb import FormattedTB

import gpulab
from gpulab.errors import GpulabError
from tests.support import leftovers
from tests.support.paths import TESTS

PACKAGE = Path(gpulab.__file__).parent

LEAKS = """
def test_leaks():
    from contextlib import ExitStack
    from unittest.mock import Mock
    from gpulab.capture.steps import hooks
    hooks.install(Mock(), ExitStack())

def test_is_innocent():
    pass
"""


def test_a_leak_of_the_first_torch_test_counts_against_it_alone(tmp_path: Path) -> None:
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    conftest = TESTS / "conftest.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, "-p", "conftest", "-c", "/dev/null", "test_leaks.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{conftest.parent}:{conftest.parents[1]}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "left behind" in done.stdout and "ERROR test_leaks.py::test_leaks" in done.stdout


def test_every_hook_and_patch_of_a_run_is_found() -> None:
    pytest.importorskip("torch")
    import torch

    from gpulab.capture.steps import hooks

    with ExitStack() as undo:
        hooks.install(Mock(), undo)
        found = leftovers.leftovers()
    assert {
        "patch of DataLoader.__iter__",
        "patch of _BaseDataLoaderIter.__next__",
        "patch of GradScaler.step",
        "patch of torch.autograd.backward",
        "patch of torch.compile",
        "hook in _global_optimizer_pre_hooks",
        "hook in _global_optimizer_post_hooks",
        "hook in _global_forward_pre_hooks",
    } <= set(found)
    with torch.profiler.profile():
        assert leftovers.leftovers() == ["a torch.profiler is active"]
    assert leftovers.leftovers() == []


def test_threads_and_processes_of_ours_are_found() -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, name="gpulab-test", daemon=True)
    thread.start()
    program = "import sys; sys.stdin.read()  # gpulab.capture"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as child:
        found = leftovers.leftovers()
        assert child.stdin is not None
        child.stdin.close()
    go_on.set()
    thread.join()
    assert "thread gpulab-test" in found and any(f.startswith("process ") for f in found)
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
