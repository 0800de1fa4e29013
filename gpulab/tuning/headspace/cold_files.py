"""Which files a run of the cell reads, and how to have them read from the disk again instead of from memory.

Files are seen where Python opens them, in the training process; those that a process maps into memory or keeps open are
found by the system's own list. Whether the system has really let go of a file is asked of it, not assumed.
"""

from __future__ import annotations

import builtins
import ctypes
import io
import mmap
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import get_ident
from typing import Any

from gpulab.torch_hooks.patching import replaced
from gpulab.user_code import PACKAGE_FOLDER

MOST = 200_000  # files
ASKED = 200  # files of which the system is asked whether it has let go
STAYS = 0.1  # of their pages: with more in memory, reading them is not reading from the disk

NO_ADVICE = "this system cannot drop a file from its page cache"
NO_FILE = "no file was read: the data is in memory, comes over the network, or is opened by other code"
IN_MEMORY = "the files stayed in the page cache"


class Opened:
    """Paths of regular files that were opened for reading while it watched, on the thread that made it."""

    def __init__(self) -> None:
        self.paths: dict[str, None] = {}
        self._thread = get_ident()

    def note(self, file: Any, mode: Any) -> None:
        if get_ident() != self._thread or len(self.paths) >= MOST:
            return
        if isinstance(file, str | bytes | os.PathLike) and not (set(str(mode)) & set("wax+")):
            with suppress(Exception):
                self.paths[os.path.abspath(os.fsdecode(file))] = None

    @property
    def data(self) -> list[str]:
        """Those that are data: no code of Python's or of packages, nothing empty."""
        return [path for path in self.paths if _is_data(path)]


@contextmanager
def watched() -> Iterator[Opened]:
    """What is opened inside. At its end also what the process has open and mapped by then."""
    opened = Opened()

    def wrap(original: Any) -> Any:
        def open(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            opened.note(file, mode)
            return original(file, mode, *args, **kwargs)

        return open

    def wrap_descriptor(original: Any) -> Any:
        def open(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            opened.note(path, "r" if not flags & (os.O_WRONLY | os.O_RDWR) else "w")
            return original(path, flags, *args, **kwargs)

        return open

    with ExitStack() as undo:
        undo.enter_context(replaced(builtins, "open", wrap))
        undo.enter_context(replaced(io, "open", wrap))
        undo.enter_context(replaced(os, "open", wrap_descriptor))
        yield opened
    for path in _held():
        opened.note(path, "r")


def drop(paths: Iterable[str]) -> None:
    """Ask the system to forget what it holds of these files in memory. Raises AttributeError where it cannot be."""
    for path in paths:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(descriptor)  # what is not on the disk yet is not forgotten
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def why_not(paths: list[str]) -> str:
    """Why these files cannot be read cold; empty where they can. Drops them to find out."""
    if not hasattr(os, "posix_fadvise"):
        return NO_ADVICE
    if not paths:
        return NO_FILE
    drop(paths)
    step = max(1, len(paths) // ASKED)
    resident = [share for share in map(resident_fraction, paths[::step]) if share is not None]
    if resident and sum(resident) / len(resident) > STAYS:
        return IN_MEMORY
    return ""


def resident_fraction(path: str) -> float | None:
    """Share of a file's pages that are in memory; None where that cannot be told."""
    mincore = _mincore()
    if mincore is None:
        return None
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            pages = -(-len(mapped) // mmap.PAGESIZE)
            in_memory = (ctypes.c_ubyte * pages)()
            first = ctypes.c_char.from_buffer(mapped)
            failed = mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), in_memory)
            del first  # the map could not be closed
            return None if failed else sum(page & 1 for page in in_memory) / pages
    except (OSError, ValueError, BufferError):
        return None


def _mincore() -> Callable[..., int] | None:
    with suppress(Exception):
        function: Callable[..., int] = ctypes.CDLL(None).mincore
        return function
    return None


def _held() -> list[str]:
    """Files that this process has open or mapped; on Linux."""
    paths: dict[str, None] = {}
    with suppress(ImportError, OSError):
        import fcntl

        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                    paths[os.readlink(f"/proc/self/fd/{name}")] = None
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(None, 5)
            if len(fields) == 6 and "x" not in fields[1]:
                paths[fields[5]] = None
    return list(paths)


def _code_folders() -> tuple[str, ...]:
    own = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()}
    own |= {"/usr/lib", "/lib", "/proc", "/sys", "/dev", "/etc", str(PACKAGE_FOLDER)}
    return tuple(sorted({os.path.join(folder, "") for folder in own if folder and folder != os.sep}))


_CODE = _code_folders()
_CODE_ENDINGS = (".py", ".pyc", ".so", ".pyd", ".dylib", ".dll", ".ipynb")


def _is_data(path: str) -> bool:
    if path.startswith(_CODE) or path.endswith(_CODE_ENDINGS) or ".so." in path:
        return False
    try:
        return os.path.isfile(path) and os.path.getsize(path) > 0
    except OSError:
        return False
