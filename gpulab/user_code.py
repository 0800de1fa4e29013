"""Classifies code as the user's, gpulab's or a library's, and lists the global names that code uses.

All of gpulab uses this classification, for files, classes, frames and traces.

The user's own code is everything except Python's library, installed packages, and gpulab itself. gpulab's demo counts
as the user's code, because it represents a reader's own training.

gpulab's own modules are recognised by the folder of the package. Exceptions within the package declare themselves
(`runs_users_code`, `counts_as_users`), so that no other module has to name their files.
"""

from __future__ import annotations

import dis
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from msgspec import Struct

CELL_WITHOUT_IPYTHON = "<cell>"  # the file name of a cell that gpulab compiles itself

TRAINING_LIBRARIES = (
    *("accelerate", "ema_pytorch", "fastai", "ignite", "lightning", "lightning_fabric", "peft", "pytorch_lightning"),
    *("timm", "torchmetrics", "torchvision", "transformers", "trl"),
)
_OTHER_LIBRARIES = (
    "torch torchaudio torchtext torchdata numpy scipy pandas PIL cv2 sklearn skimage datasets lightning_utilities "
    "diffusers tokenizers safetensors huggingface_hub deepspeed apex megatron fsspec tqdm wandb mlflow tensorboard "
    "tensorboardX matplotlib IPython ipykernel ipywidgets traitlets tornado zmq albumentations webdataset nvidia "
    "triton einops ray composer streaming monai jax flax tensorflow keras decorator gpulab"
)
LIBRARIES = frozenset((*TRAINING_LIBRARIES, *_OTHER_LIBRARIES.split()))

PACKAGE_FOLDER = Path(next(iter(sys.modules[__name__.partition(".")[0]].__path__)))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_INSTALLED_ANYWHERE = re.compile(r"(?:^|[/\\])(?:site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]")
_MOST_FILES = 100_000


def _inside(*folders: str | None) -> tuple[str, ...]:
    """The path prefixes of all files in these folders."""
    existing = {folder for folder in folders if folder}
    return tuple(os.path.join(folder, "") for folder in existing | {os.path.realpath(folder) for folder in existing})


_GPULAB = _inside(str(PACKAGE_FOLDER))
_STDLIB = _inside(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


class Owner(Enum):
    """Who wrote a file. `RUNNER`: a gpulab file that runs the user's code; frames outside it are not the user's."""

    USER = "user"
    GPULAB = "gpulab"
    RUNNER = "runner"
    LIBRARY = "library"


class _Owners(dict[str, Owner]):
    """Owners by file name; each file is classified once, because samplers look up every frame."""

    def __missing__(self, file: str) -> Owner:
        owner = _owner(file)
        if len(self) < _MOST_FILES:
            self[file] = owner
        return owner


owners = _Owners()
_runners: set[str] = set()
_stand_ins: tuple[str, ...] = ()


def runs_users_code(file: str) -> None:
    """Called by a gpulab module with its `__file__`: it runs the user's code."""
    _runners.update((file, os.path.realpath(file)))
    owners.clear()


def counts_as_users(file: str) -> None:
    """Called by a gpulab package with its `__file__`: its code counts as the user's."""
    global _stand_ins
    _stand_ins = (*_stand_ins, *_inside(os.path.dirname(file)))
    owners.clear()


def _owner(file: str) -> Owner:
    if is_cell(file):
        return Owner.USER
    if not file or file.startswith("<"):  # generated: by a dataclass, by torch.compile
        return Owner.LIBRARY
    if file.startswith(_stand_ins):
        return Owner.USER
    if file.startswith(_GPULAB):
        return Owner.RUNNER if file in _runners else Owner.GPULAB
    if any(part in file for part in _INSTALLED):
        return Owner.LIBRARY
    real = os.path.realpath(file)
    if real != file and real.startswith(_GPULAB):
        return _owner(real)
    return Owner.LIBRARY if real.startswith(_STDLIB) else Owner.USER


def is_users_file(file: str) -> bool:
    """Whether the file is the user's own. Generated code, which has no file, is not."""
    return owners[file] is Owner.USER


def is_gpulabs_file(file: str) -> bool:
    """Whether the file is gpulab's own."""
    return owners[file] in (Owner.GPULAB, Owner.RUNNER)


def is_users_code(code: CodeType) -> bool:
    """Whether the user wrote this code, or may have generated it (`exec`, a dataclass's methods)."""
    file = code.co_filename
    return is_users_file(file) or not file or (file.startswith("<") and not file.startswith("<frozen"))


def is_users_class(kind: type) -> bool:
    """Whether the user wrote this class, in the notebook or in a module."""
    home = str(vars(type)["__module__"].__get__(kind))  # whatever its metaclass makes of it
    if home == "__main__":
        return True
    file = getattr(sys.modules.get(home), "__file__", None)
    return isinstance(file, str) and is_users_file(file)


def is_users_in_trace(file: str) -> bool:
    """Whether a file that a trace names is the user's own, even if the trace is from another machine.

    torch strips the folder of an installed library from file names: the rest begins with the library's name.
    """
    top = re.split(r"[/\\]", file)[0].removesuffix(".py")
    return not (_INSTALLED_ANYWHERE.search(file) or top in sys.stdlib_module_names or top in LIBRARIES)


def is_cell(file: str) -> bool:
    """Whether the file is a cell of a notebook."""
    return file == CELL_WITHOUT_IPYTHON or file in ipython_cells() or file.startswith("<ipython-input-")


def ipython_cells() -> dict[str, int]:
    """The cells that IPython has compiled: number by file name."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    return getattr(getattr(shell, "compile", None), "_filename_map", {})


def within_gpulab(frame: FrameType | None) -> bool:
    """Whether this frame or a caller is gpulab's own, searching outwards to the frame that runs the user's code."""
    while frame is not None and (owner := owners[frame.f_code.co_filename]) is not Owner.RUNNER:
        if owner is Owner.GPULAB:
            return True
        frame = frame.f_back
    return False


def hide_gpulabs_frames(error: BaseException) -> None:
    """Remove gpulab's own frames from a traceback, so that the user sees it as without gpulab.

    Causes, contexts and members of exception groups are treated likewise.
    """
    waiting: list[BaseException] = [error]
    visited: set[int] = set()
    while waiting:
        e = waiting.pop()
        if id(e) in visited:
            continue
        visited.add(id(e))
        entries = [
            entry for entry in _entries(e.__traceback__) if not is_gpulabs_file(entry.tb_frame.f_code.co_filename)
        ]
        for entry, following in zip(entries, (*entries[1:], None), strict=False):
            entry.tb_next = following
        e.__traceback__ = entries[0] if entries else None
        grouped = e.exceptions if isinstance(e, BaseExceptionGroup) else ()
        waiting += [linked for linked in (e.__cause__, e.__context__, *grouped) if linked is not None]


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


class GlobalNames(Struct):
    """The global names that code uses. `reads`: before the code binds them; `binds`: bound at its top level.

    `calls_read`: names that its inner functions read when called; `calls_assign`: names that they or the code assign.
    """

    reads: set[str]
    binds: set[str]
    calls_read: set[str]
    calls_assign: set[str]


_LOADS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"})
_STORES = frozenset({"STORE_NAME", "STORE_GLOBAL"})
_ASSIGNS = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})


def global_names(code: CodeType) -> GlobalNames:
    """The global names, from the byte code. Inner class bodies and comprehensions run at once, functions on a call."""
    names = GlobalNames(set(), set(), set(), set())
    for instruction in dis.get_instructions(code):
        operation, name = instruction.opname, instruction.argval
        if operation in _LOADS and name not in names.binds:
            names.reads.add(name)
        if operation in _STORES:
            names.binds.add(name)
        if operation in _ASSIGNS:
            names.calls_assign.add(name)
    for inner in (c for c in code.co_consts if isinstance(c, CodeType)):
        within = global_names(inner)
        runs_now = not inner.co_flags & inspect.CO_OPTIMIZED or inner.co_name in _COMPREHENSIONS
        (names.reads if runs_now else names.calls_read).update(within.reads)
        names.calls_read |= within.calls_read
        names.calls_assign |= within.calls_assign
    return names
