"""Whose code it is: the user's, gpulab's or a library's; and which global names it uses.

It is the one answer for files, classes, frames and traces.

The user's own code is all but Python's library, what is installed, and gpulab itself. gpulab's demo counts as the
user's, because it stands for the training that a reader would bring.

gpulab's own modules are recognised by the folder of the whole package. What differs within the package marks itself
where it stands (`runs_users_code`, `counts_as_users`), so that no other module has to name its file.
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
    """How the paths of all files in these folders begin."""
    existing = {folder for folder in folders if folder}
    return tuple(os.path.join(folder, "") for folder in existing | {os.path.realpath(folder) for folder in existing})


_GPULAB = _inside(str(PACKAGE_FOLDER))
_STDLIB = _inside(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


class Owner(Enum):
    """Who wrote a file. `RUNNER`: gpulab's too, and it runs the user's code; the frames above are not part of that."""

    USER = "user"
    GPULAB = "gpulab"
    RUNNER = "runner"
    LIBRARY = "library"


class _Owners(dict[str, Owner]):
    """By file name; each file is judged once, because samplers ask for every frame that they see."""

    def __missing__(self, file: str) -> Owner:
        owner = _owner(file)
        if len(self) < _MOST_FILES:
            self[file] = owner
        return owner


owners = _Owners()
_runners: set[str] = set()
_stand_ins: tuple[str, ...] = ()


def runs_users_code(file: str) -> None:
    """A module of gpulab's marks itself by its `__file__`: it runs the user's code."""
    _runners.update((file, os.path.realpath(file)))
    owners.clear()


def counts_as_users(file: str) -> None:
    """A package of gpulab's marks itself by its `__file__`: its code stands for the user's."""
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
    """Whether code of that file name is the user's own. Generated code, which has no file, is nobody's."""
    return owners[file] is Owner.USER


def is_gpulabs_file(file: str) -> bool:
    """Whether it is gpulab's own."""
    return owners[file] in (Owner.GPULAB, Owner.RUNNER)


def is_users_code(code: CodeType) -> bool:
    """Whether the user wrote this code, or may have had it generated (`exec`, a dataclass's methods)."""
    file = code.co_filename
    return is_users_file(file) or not file or (file.startswith("<") and not file.startswith("<frozen"))


def is_users_class(kind: type) -> bool:
    """Whether the user wrote this class: in the notebook, or in a module beside it."""
    home = str(kind.__module__)
    if home == "__main__":
        return True
    file = getattr(sys.modules.get(home), "__file__", None)
    return isinstance(file, str) and is_users_file(file)


def is_users_in_trace(file: str) -> bool:
    """Whether a file that a trace names is the user's own, also where the trace comes from another machine.

    torch strips the folder of an installed library from its file names: what is left begins with the library's name.
    """
    top = re.split(r"[/\\]", file)[0].removesuffix(".py")
    return not (_INSTALLED_ANYWHERE.search(file) or top in sys.stdlib_module_names or top in LIBRARIES)


def is_cell(file: str) -> bool:
    """Whether it is a cell of a notebook."""
    return file == CELL_WITHOUT_IPYTHON or file in ipython_cells() or file.startswith("<ipython-input-")


def ipython_cells() -> dict[str, int]:
    """The cells that IPython has compiled: the file name of each, and its number."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    return getattr(getattr(shell, "compile", None), "_filename_map", {})


def within_gpulab(frame: FrameType | None) -> bool:
    """Whether this frame, or one that led to it, is gpulab's own: from here outwards to what runs the user's code."""
    while frame is not None and (owner := owners[frame.f_code.co_filename]) is not Owner.RUNNER:
        if owner is Owner.GPULAB:
            return True
        frame = frame.f_back
    return False


def hide_gpulabs_frames(error: BaseException) -> None:
    """Take gpulab's own frames out of a traceback, so that the user sees their code as without gpulab.

    The errors it was raised from or groups are treated likewise.
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
    """The global names that code uses. `reads`: before it binds them itself; `binds`: at its top level.

    `calls_read`: what the functions inside it read once they are called; `calls_assign`: what those, and it, assign.
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
    """By its byte code. Class bodies and comprehensions inside it run with it, functions when they are called."""
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
