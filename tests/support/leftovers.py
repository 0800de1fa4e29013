"""What a run could leave behind in a process or in a traceback: found by looking at whose code it is.

That is asked of the package's folder, never of the word gpulab: `git clone` gives its own folder that name, and an
environment in it holds every library. Nothing is compared with before.

Needs nothing of the tests, so that a kernel can be given this file's text and answer for itself.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import multiprocessing.process
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MethodType, ModuleType


def leftovers() -> list[str]:
    """Everything of gpulab's that is still there, in words; empty where nothing is."""
    recorder = sys.modules.get("gpulab.capture.recorder")
    active = ["a capture is active"] if recorder is not None and recorder.active is not None else []
    turn = sys.modules.get("gpulab.capture.exclusive")
    held = ["a thread's turn to measure"] if turn is not None and any(t.is_alive() for t in turn._owners) else []
    return [*active, *held, *_signals(), *_threads(), *_processes(), *_in_torch(), *_pause_hooks()]


def _signals() -> Iterator[str]:
    """A handler, and the functions that set one."""
    functions = {name: getattr(signal, name) for name in ("signal", "getsignal")}
    handlers = {number.name: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield from (f"patch of signal.{name}" for name, found in functions.items() if is_own_code(found))
    yield from (f"handler of {name}" for name, found in handlers.items() if is_own_code(found))


def _threads() -> list[str]:
    return [f"thread {t.name}" for t in threading.enumerate() if t.name.startswith("gpulab")]


def _processes() -> Iterator[str]:
    if not _has_children():
        return
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            line = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if "gpulab.capture" in line or "gpulab.views" in line:
            yield f"process {line}"


def _has_children() -> bool:
    """Whether the system knows of any child of this process: without one it need not be asked for all processes."""
    if not hasattr(os, "waitid"):
        return True
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _in_torch() -> Iterator[str]:
    """Patches and hooks whose code is in gpulab's folder, and a profiler that still runs."""
    if "torch" not in sys.modules or "gpulab" not in sys.modules:
        return
    import torch
    from torch._C._autograd import _profiler_enabled
    from torch.amp import GradScaler
    from torch.nn.modules import module
    from torch.optim import optimizer
    from torch.utils.data import dataloader
    from torch.utils.data._utils import pin_memory

    iterators: tuple[type, ...] = (dataloader._BaseDataLoaderIter, *dataloader._BaseDataLoaderIter.__subclasses__())
    classes: tuple[type, ...] = (
        dataloader.DataLoader,
        *iterators,
        optimizer.Optimizer,
        GradScaler,
        module.Module,
        torch.Tensor,
    )
    classes = (*classes, torch.no_grad, torch.inference_mode, multiprocessing.process.BaseProcess)
    loading = (pin_memory, dataloader._DatasetKind)
    owners: tuple[type | ModuleType, ...] = (torch, torch.autograd, *classes, *loading)
    for owner in owners:
        # Lightning wraps torch.compile for good when it is imported: what counts is the outermost function's home
        yield from (f"patch of {owner.__name__}.{name}" for name, found in vars(owner).items() if is_own_code(found))
    for hooked in (module, optimizer):
        yield from (f"hook in {name}" for name, hook in _global_hooks(hooked) if is_own_code(hook))
    if _profiler_enabled():
        yield "a torch.profiler is active"


def _pause_hooks() -> Iterator[str]:
    """Hooks of gpulab/capture/pauses/hooks.py: in Python's collector, in torch's compiler, in what saves and logs."""
    found = sys.modules.get("gpulab.capture.pauses.hooks")
    if found is None:
        return
    compiler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    callbacks = [*gc.callbacks, *getattr(compiler, "start_callbacks", []), *getattr(compiler, "end_callbacks", [])]
    yield from (f"callback {callback!r}" for callback in callbacks if is_own_code(callback))
    for target in found.TARGETS:
        owner = sys.modules.get(target.module)
        owner = vars(owner).get(target.owner) if owner is not None and target.owner else owner
        if owner is not None and is_own_code(vars(owner).get(target.name)):
            yield f"patch of {target.module}.{target.owner}.{target.name}"


def _global_hooks(owner: ModuleType) -> Iterator[tuple[str, object]]:
    for name, hooks in vars(owner).items():
        if name.startswith("_global_") and isinstance(hooks, dict):
            yield from ((name, hook) for hook in hooks.values())


def is_own_code(found: object) -> bool:
    """By the file of its code: `functools.wraps` changes a function's names, not that."""
    function = _function(found)
    return isinstance(function, FunctionType) and function.__code__.co_filename.startswith(_package_folder())


def own_frames(shown: str | BaseException) -> list[str]:
    """The lines of a traceback, as Python or IPython writes it, that name a file of gpulab's package."""
    text = shown if isinstance(shown, str) else "".join(traceback.format_exception(shown))
    folder = _package_folder()
    below_home = "~" + folder.removeprefix(os.path.expanduser("~").rstrip(os.sep))  # as IPython writes it
    return [line for line in text.splitlines() if folder in line or below_home in line]


def _package_folder() -> str:
    package = sys.modules.get("gpulab")
    spec = package.__spec__ if package is not None else importlib.util.find_spec("gpulab")
    assert spec is not None and spec.origin is not None
    return _folder_of(spec.origin)


@functools.cache
def _folder_of(file: str) -> str:
    """The folder of a file; asked for each of some thousand functions after each test."""
    return str(Path(file).parent) + os.sep


def _function(found: object) -> object:
    """The function within a method or a partial. Asks for no attribute of other things: torch's make themselves up."""
    if isinstance(found, functools.partial):
        return _function(found.func)
    return found.__func__ if isinstance(found, MethodType | staticmethod | classmethod) else found
