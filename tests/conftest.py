"""Fixtures for every test: a store of its own, and the proof that nothing of gpulab's is left behind."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import psutil
import pytest

from tests.support.leftovers import leftovers

if TYPE_CHECKING:
    from tests.support.fake_cuda import FakeCuda

hypothesis.settings.register_profile("gpulab", deadline=None)  # time is never asserted in a test
hypothesis.settings.load_profile("gpulab")

PATIENCE_S = 60.0  # for what is just ending, on a busy machine

_told: set[str] = set()  # what an earlier test left: it is not held against the later ones


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
    """After each test: no hook, patch, thread, process, file handle or half-written run of ours."""
    yield
    deadline = time.monotonic() + PATIENCE_S
    while (left := {*leftovers(), *_open_files(tmp_path)} - _told) and time.monotonic() < deadline:
        time.sleep(0.02)
    _told.update(left)
    assert not left, f"left behind: {sorted(left)}"


def _open_files(tmp_path: Path) -> list[str]:
    return [f"open file {f.path}" for f in psutil.Process().open_files() if f.path.startswith(str(tmp_path))]
