"""Fixtures for every test: a store of its own, and the proof that nothing of gpulab's is left behind."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of a test go to its temporary folder."""
    folder = tmp_path / "gpulab-store"
    monkeypatch.setenv("GPULAB_DIR", str(folder))
    return folder


@pytest.fixture(autouse=True)
def nothing_left_behind(own_store: Path, tmp_path: Path) -> Iterator[None]:
    """After each test: no hook, patch, thread, process, file handle or half-written run of ours."""
    torch_before = _torch_state()
    environment_before = dict(os.environ)
    yield
    assert _torch_state() == torch_before or not torch_before, "a hook or patch in torch is left"
    assert _gone(_our_threads), f"threads are left: {_our_threads()}"
    assert _gone(_our_processes), f"processes are left: {_our_processes()}"
    assert not _our_open_files(tmp_path), f"open files are left: {_our_open_files(tmp_path)}"
    recorder = sys.modules.get("gpulab.capture.recorder")
    assert recorder is None or recorder.active is None, "a capture is still active"
    changed = {k for k in {*environment_before, *os.environ} if environment_before.get(k) != os.environ.get(k)}
    assert "KINETO_LOG_LEVEL" not in changed, "our environment variable is left"


def _torch_state() -> dict[str, Any]:
    """Everything in torch that a capture touches; empty while torch is not imported."""
    if "torch" not in sys.modules or "torch.utils.data" not in sys.modules:
        return {}
    import torch
    from torch.amp import GradScaler
    from torch.nn.modules import module
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    return {
        "iter": dataloader.DataLoader.__iter__,
        "next": dataloader._BaseDataLoaderIter.__next__,
        "scaler": GradScaler.step,
        "backward": torch.autograd.backward,
        # Lightning wraps torch.compile for good when it is imported: what counts is the outermost function's home
        "compile": "gpulab" if torch.compile.__code__.co_filename.endswith("hooks.py") else "",
        "pre": len(optimizer._global_optimizer_pre_hooks),
        "post": len(optimizer._global_optimizer_post_hooks),
        "forward": len(module._global_forward_pre_hooks),
        "profiler": torch.autograd._profiler_enabled(),
    }


def _gone(left: Any, patience_s: float = 3.0) -> bool:
    """Whether nothing is left, after a moment for what is just ending."""
    deadline = time.monotonic() + patience_s
    while left():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _our_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gpulab")]


def _our_processes() -> list[str]:
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            line = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if "gpulab.capture" in line:
            found.append(line)
    return found


def _our_open_files(tmp_path: Path) -> list[str]:
    return [f.path for f in psutil.Process().open_files() if f.path.startswith(str(tmp_path))]
