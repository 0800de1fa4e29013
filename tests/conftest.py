"""Fixtures for every test: a store of its own, and the proof that nothing of gpulab's is left behind."""

from __future__ import annotations

import gc
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import psutil
import pytest

from tests.support.leftovers import leftovers
from tests.support.slow_tests import note_reasons, pytest_runtest_logreport, pytest_terminal_summary

__all__ = ["pytest_runtest_logreport", "pytest_terminal_summary"]  # hooks

if TYPE_CHECKING:
    from xdist.remote import Producer

    from tests.support.fake_cuda import FakeCuda
    from tests.support.scheduling import Scheduling

# time is never asserted in a test, nor how fast examples are made
hypothesis.settings.register_profile("gpulab", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("gpulab")

PATIENCE_S = 60.0  # for what is just ending, on a busy machine

_numbers = itertools.count()
_told: set[str] = set()  # what an earlier test left: it is not held against the later ones


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """In several processes what takes longest begins, so that none stands idle at the end."""
    from tests.support.scheduling import Scheduling

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order that the scheduler keeps, where this is one of several processes."""
    note_reasons(items)
    if hasattr(config, "workerinput"):
        from tests.support.scheduling import sort_longest_first

        items[:] = sort_longest_first(items)


def pytest_collection_finish() -> None:
    """The collector no longer walks what is imported by now.

    Half a million objects of torch and its libraries take it a second at each `gc.collect()` of a test or of gpulab.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test's own, as pytest's; without its search for a free number and its link to the newest."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    folder = tmp_path_factory.getbasetemp() / f"{name}{next(_numbers)}"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Runs of a test go to its temporary folder, and out of the list of this process's runs after it."""
    folder = tmp_path / "gpulab-store"
    monkeypatch.setenv("GPULAB_DIR", str(folder))
    monkeypatch.setenv("GPULAB_CACHE_DIR", str(tmp_path / "gpulab-cache"))
    yield folder
    reading = sys.modules.get("gpulab.api.reading")
    if reading is not None:
        reading.runs._own.clear()


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Two scripted GPUs in the place of `torch.cuda`; CUDA is not started yet."""
    from tests.support.fake_cuda import FakeCuda, install

    return install(FakeCuda(count=2), monkeypatch)


@pytest.fixture
def torch_without_a_space(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's headers and libraries by a path that its compiler can take, wherever the clone lies."""
    import torch
    from torch.utils import cpp_extension

    folder = Path(torch.__file__).parent
    if " " in str(folder):
        link = tmp_path_factory.mktemp("link") / "torch"
        link.symlink_to(folder)
        monkeypatch.setattr(torch, "__file__", str(link / "__init__.py"))
        monkeypatch.setattr(cpp_extension, "_TORCH_PATH", str(link))
        monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(link / "lib"))


@pytest.fixture(autouse=True)
def nothing_left_behind(own_store: Path, tmp_path: Path) -> Iterator[None]:
    """After each test: no hook, replaced function, thread, process or file handle of ours."""
    yield
    _check_left("the test", lambda: [*leftovers(sweep=False), *_open_files(tmp_path)])


@pytest.fixture(autouse=True, scope="module")
def nothing_left_in_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each file: no function of ours in any of the classes and modules that could have one."""
    yield
    _check_left(request.node.nodeid, leftovers)


def _check_left(by: str, look: Callable[[], list[str]]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (left := {*look()} - _told) and time.monotonic() < deadline:
        time.sleep(0.02)
    _told.update(left)
    assert not left, f"left behind by {by}: {sorted(left)}"


def _open_files(tmp_path: Path) -> list[str]:
    return [f"open file {f.path}" for f in psutil.Process().open_files() if f.path.startswith(str(tmp_path))]
