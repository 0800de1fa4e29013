"""Which objects are put back attribute by attribute: the border of what a state covers.

An object that stands for something outside of Python (an open file, a thread, a window) must not be turned back: the
thing itself would not follow. So only three sorts are: what torch trains with, by its base class; objects of the
libraries that people train with; and objects of classes that the user wrote.
"""

from __future__ import annotations

import sys
from typing import Any

from gpulab.user_code import TRAINING_LIBRARIES, is_users_class

TORCH_PARTS = ("torch.amp", "torch.cuda.amp", "torch.nn", "torch.optim", "torch.utils.data")
OUTSIDE = (  # threads, processes, files, windows, kernels
    *("IPython", "_io", "_thread", "asyncio", "concurrent", "ctypes", "enum", "io", "ipykernel", "ipywidgets"),
    *("logging", "matplotlib", "multiprocessing", "pandas", "pathlib", "queue", "socket", "sqlite3", "ssl"),
    *("subprocess", "tempfile", "threading", "traitlets", "zmq"),
)
OUTSIDE_PARTS = (
    "accelerate.tracking",
    "lightning.fabric.loggers",
    "lightning.pytorch.callbacks.progress",
    "lightning.pytorch.loggers",
    "pytorch_lightning.callbacks.progress",
    "pytorch_lightning.loggers",
    "transformers.integrations",
    "transformers.utils.notebook",
)
PLAIN = ("types.SimpleNamespace", "argparse.Namespace")


def is_put_back(kind: type) -> bool:
    """Whether objects of this type are put back attribute by attribute."""
    if issubclass(kind, torch_bases()):
        return True
    if issubclass(kind, BaseException | type) or any(_package(base) in OUTSIDE for base in kind.__mro__):
        return False
    home = str(kind.__module__)
    if is_plain(kind) or is_users_class(kind):
        return True
    if _part_of(home, TORCH_PARTS):
        return all(base.__name__ != "_BaseDataLoaderIter" for base in kind.__mro__)
    return _package(kind) in TRAINING_LIBRARIES and not _part_of(home, OUTSIDE_PARTS)


def is_plain(kind: type) -> bool:
    """Whether it is a bare holder of attributes."""
    return f"{kind.__module__}.{kind.__qualname__}" in PLAIN


def torch_bases() -> tuple[type, ...]:
    """The base classes of what torch trains with; empty while torch is not imported."""
    return (*modules(), *trainers(), *_data())


def modules() -> tuple[type, ...]:
    """`torch.nn.Module`, where torch is imported."""
    torch = imported_torch()
    return () if torch is None else (torch.nn.Module,)


def trainers() -> tuple[type, ...]:
    """Optimizers, schedulers of the learning rate, gradient scalers: each tensor of theirs is state."""
    torch = imported_torch()
    if torch is None:
        return ()
    return (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


def loaders() -> tuple[type, ...]:
    """`torch.utils.data.DataLoader`, where torch is imported."""
    torch = imported_torch()
    return () if torch is None else (torch.utils.data.DataLoader,)


def _data() -> tuple[type, ...]:
    torch = imported_torch()
    return () if torch is None else (*loaders(), torch.utils.data.Dataset, torch.utils.data.Sampler)


def imported_torch() -> Any:
    """torch, if somebody imported it, completely; else None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "optim") and hasattr(torch, "utils") else None


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _part_of(home: str, parts: tuple[str, ...]) -> bool:
    return any(home == part or home.startswith(part + ".") for part in parts)
