"""What a run could leave behind in a process: found by looking at whose code it is, never by comparing with before.

Needs nothing of the tests, so that a kernel can be given this file's text and answer for itself.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MethodType, ModuleType


def leftovers() -> list[str]:
    """Everything of gpulab's that is still there, in words; empty where nothing is."""
    recorder = sys.modules.get("gpulab.capture.recorder")
    active = ["a capture is active"] if recorder is not None and recorder.active is not None else []
    turn = sys.modules.get("gpulab.capture.turn")
    held = ["a thread's turn to measure"] if turn is not None and any(t.is_alive() for t in turn._owners) else []
    return [*active, *held, *_threads(), *_processes(), *_in_torch()]


def _threads() -> list[str]:
    return [f"thread {t.name}" for t in threading.enumerate() if t.name.startswith("gpulab")]


def _processes() -> Iterator[str]:
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            line = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if "gpulab.capture" in line or "gpulab.views" in line:
            yield f"process {line}"


def _in_torch() -> Iterator[str]:
    """Patches and hooks whose code is in gpulab's folder, and a profiler that still runs."""
    if "torch" not in sys.modules or "gpulab" not in sys.modules:
        return
    import torch
    from torch.amp import GradScaler
    from torch.nn.modules import module
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    iterators = (dataloader._BaseDataLoaderIter, *dataloader._BaseDataLoaderIter.__subclasses__())
    classes = (dataloader.DataLoader, *iterators, optimizer.Optimizer, GradScaler, module.Module, torch.Tensor)
    for owner in (torch, torch.autograd, *classes):
        # Lightning wraps torch.compile for good when it is imported: what counts is the outermost function's home
        yield from (f"patch of {owner.__name__}.{name}" for name, found in vars(owner).items() if _is_ours(found))
    for owner in (module, optimizer):
        yield from (f"hook in {name}" for name, hook in _global_hooks(owner) if _is_ours(hook))
    if torch.autograd._profiler_enabled():
        yield "a torch.profiler is active"


def _global_hooks(owner: ModuleType) -> Iterator[tuple[str, object]]:
    for name, hooks in vars(owner).items():
        if name.startswith("_global_") and isinstance(hooks, dict):
            yield from ((name, hook) for hook in hooks.values())


def _is_ours(found: object) -> bool:
    """By the file of its code: `functools.wraps` changes a function's names, not that."""
    folder = str(Path(str(sys.modules["gpulab"].__file__)).parent) + os.sep
    function = _function(found)
    return isinstance(function, FunctionType) and function.__code__.co_filename.startswith(folder)


def _function(found: object) -> object:
    """The function within a method or a partial. Asks for no attribute of other things: torch's make themselves up."""
    if isinstance(found, functools.partial):
        return _function(found.func)
    return found.__func__ if isinstance(found, MethodType | staticmethod | classmethod) else found
