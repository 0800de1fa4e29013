"""What a run could leave behind in a process or in a traceback: found by looking at whose code it is.

That is asked of the package's folder, never of the word gpulab: `git clone` gives its own folder that name, and an
environment in it holds every library. Nothing is compared with before.

Needs nothing of the tests, so that a kernel can be given this file's text and answer for itself.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, MethodType

_LOADERS = "torch.utils.data.dataloader"
# What gpulab replaces, by the module and the class in it, besides the table of its hooks; a test compares it with the
# package. What has no names here is only swept.
REPLACED: dict[tuple[str, str], tuple[str, ...]] = {
    ("builtins", ""): ("open",),
    ("io", ""): ("open",),
    ("multiprocessing.process", "BaseProcess"): ("start",),
    ("os", ""): ("open",),
    ("torch", ""): ("compile", "set_anomaly_enabled"),
    ("torch", "Tensor"): (),
    ("torch._C._autograd", ""): ("_saved_tensors_hooks_disable",),
    ("torch._dynamo.eval_frame", "OptimizedModule"): ("_initialize",),
    ("torch.amp", "GradScaler"): ("scale",),
    ("torch.amp.autocast_mode", "autocast"): ("__enter__",),
    ("torch.autograd.function", "FunctionCtx"): ("save_for_backward",),
    ("torch.distributed.distributed_c10d", ""): ("_update_default_pg",),
    ("torch.distributions", "Distribution"): ("__init__",),
    ("torch.nn", "Module"): ("__call__",),
    ("torch.nn.parallel", "DistributedDataParallel"): ("__init__", "forward"),
    ("torch.optim.optimizer", "Optimizer"): (),
    ("torch.utils.checkpoint", ""): ("_checkpoint_without_reentrant_generator",),
    ("torch.profiler.profiler", ""): ("_warn_once", "torch"),
    (_LOADERS, "DataLoader"): ("__len__",),
    (_LOADERS, "_DatasetKind"): (),
    (_LOADERS, "_MultiProcessingDataLoaderIter"): ("__init__", "_next_data"),
    (_LOADERS, "_SingleProcessDataLoaderIter"): ("__init__", "_next_data"),
    ("warnings", ""): ("showwarning",),
}
_FUNCTIONS = (functools.partial, FunctionType, MethodType, staticmethod, classmethod)


def leftovers(*, sweep: bool = True) -> list[str]:
    """Everything of gpulab's that is still there, in words; empty where nothing is.

    With `sweep` among all functions of those modules and classes, else among those that gpulab replaces.
    """
    recorder = sys.modules.get("gpulab.capture.recorder")
    active = ["a capture is active"] if recorder is not None and recorder.active is not None else []
    turn = sys.modules.get("gpulab.capture.threads")
    held = ["a thread's turn to measure"] if turn is not None and any(t.is_alive() for t in turn._owners) else []
    in_torch = (*_replaced(sweep=sweep), *_global_hooks(), *_profilers(), *_callbacks())
    return [*active, *held, *_signals(), *_threads(), *_processes(), *in_torch]


def _replaced(*, sweep: bool) -> Iterator[str]:
    # Lightning wraps torch.compile for good when it is imported: what counts is the outermost function's home
    for (module, name), functions_replaced in replaced().items():
        owner = _owner(module, name)
        functions: Mapping[str, object] = vars(owner) if owner is not None else {}
        names = list(functions) if sweep else list(functions_replaced)
        yield from (f"patch of {name or module}.{n}" for n in names if is_own_code(functions.get(n)))


def replaced() -> dict[tuple[str, str], tuple[str, ...]]:
    """All that may be replaced by now: with the tables of the hooks, once they are imported."""
    table = dict(REPLACED)
    hooks = sys.modules.get("gpulab.capture.torch_hooks")
    if hooks is not None:
        points = [(point.module, point.owner, point.name) for point in hooks.POINTS]
        for module, owner, name, *_ in (*points, *hooks.SWITCHES, *hooks.LOADING, *hooks.SAVES):
            table[module, owner] = (*table.get((module, owner), ()), name)
    return table


def _owner(module: str, name: str) -> object:
    """Of what is imported by now."""
    found = sys.modules.get(module)
    return vars(found).get(name) if found is not None and name else found


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


def _profilers() -> Iterator[str]:
    if "torch" in sys.modules:
        from torch._C._autograd import _profiler_enabled

        if _profiler_enabled():
            yield "a torch.profiler is active"


def _callbacks() -> Iterator[str]:
    """In Python's collector and in torch's compiler."""
    compiler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    callbacks = [*gc.callbacks, *getattr(compiler, "start_callbacks", []), *getattr(compiler, "end_callbacks", [])]
    yield from (f"callback {callback!r}" for callback in callbacks if is_own_code(callback))


def _global_hooks() -> Iterator[str]:
    for owner in map(sys.modules.get, ("torch.nn.modules.module", "torch.optim.optimizer")):
        for name, hooks in vars(owner).items() if owner is not None else ():
            if name.startswith("_global_") and isinstance(hooks, dict):
                yield from (f"hook in {name}" for hook in hooks.values() if is_own_code(hook))


def is_own_code(found: object) -> bool:
    """By the file of its code: `functools.wraps` changes a function's names, not that."""
    function = _function(found) if issubclass(type(found), _FUNCTIONS) else None
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
