"""Data for the headspace test: batches that are already on the device, and files that are not in the page cache.

A few real batches of the user's loader are reused; each is copied when it is handed out, because a loop may change its
batch. The loader's sampler still runs, so that an epoch has its usual number of batches. Workers do not start unless
the loader needs them; then they idle once they have loaded ahead.

Files are recorded when Python opens them in the training process; files that the process maps or holds open are read
from /proc. Whether a file really left the page cache is checked with `mincore`, not assumed.
"""

from __future__ import annotations

import builtins
import copy
import ctypes
import functools
import io
import mmap
import os
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import get_ident
from typing import Any

from gpulab.capture.loader_facts import samples_in
from gpulab.knobs.changed_loader import overriding
from gpulab.knobs.knob import KnobEffects
from gpulab.patching.attributes import replaced
from gpulab.user_code import PACKAGE_FOLDER

MOST = 200_000  # files
PROBES = 200  # files that are checked for pages still in memory
STAYS = 0.1  # of their pages: with more in memory, a read does not come from the disk

NO_ADVICE = "this system cannot drop a file from its page cache"
NO_FILE = "no file was read: the data is in memory, comes over the network, or is opened by other code"
IN_MEMORY = "the files stayed in the page cache"


class FileLog:
    """Paths of regular files that one thread, the log's creator, opens for reading."""

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
        """Paths of data files: no code, no part of Python or of packages, no empty file."""
        return [path for path in self.paths if _is_data(path)]


@contextmanager
def logging_files() -> Iterator[FileLog]:
    """Log the files opened inside, and at the end the files that the process has open or mapped."""
    log = FileLog()

    def wrap(original: Any) -> Any:
        def open(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            log.note(file, mode)
            return original(file, mode, *args, **kwargs)

        return open

    def wrap_descriptor(original: Any) -> Any:
        def open(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            log.note(path, "r" if not flags & (os.O_WRONLY | os.O_RDWR) else "w")
            return original(path, flags, *args, **kwargs)

        return open

    with ExitStack() as undo:
        undo.enter_context(replaced(builtins, "open", wrap))
        undo.enter_context(replaced(io, "open", wrap))
        undo.enter_context(replaced(os, "open", wrap_descriptor))
        yield log
    for path in _open_files():
        log.note(path, "r")


def drop(paths: Iterable[str]) -> None:
    """Ask the system to drop these files from its page cache. Raises AttributeError if the system has no such call."""
    for path in paths:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(descriptor)  # pages not yet written to the disk cannot be dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def why_not(paths: list[str]) -> str:
    """Why these files cannot be read cold; empty if they can. Drops them to find out."""
    if not hasattr(os, "posix_fadvise"):
        return NO_ADVICE
    if not paths:
        return NO_FILE
    drop(paths)
    step = max(1, len(paths) // PROBES)
    resident = [share for share in map(resident_fraction, paths[::step]) if share is not None]
    if resident and sum(resident) / len(resident) > STAYS:
        return IN_MEMORY
    return ""


def resident_fraction(path: str) -> float | None:
    """The fraction of a file's pages in memory; None if unknown."""
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


def _open_files() -> list[str]:
    """Files that this process has open or mapped (Linux only)."""
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


BATCHES = 3  # of each loader, loaded before the first step


@contextmanager
def reusing_batches(device: str) -> Iterator[None]:
    """Inside, every DataLoader iterated on this thread yields the same few batches, on torch's `device`."""
    from torch.utils.data import dataloader

    pool = _Pool(device)
    several, single = dataloader._MultiProcessingDataLoaderIter, dataloader._SingleProcessDataLoaderIter
    with (
        overriding("num_workers", 0, KnobEffects()),
        replaced(several, "_next_data", pool.wrap),
        replaced(single, "_next_data", pool.wrap),
    ):
        yield


class _Pool:
    """The batches of each loader, by the sampler that it shares with its iterators, then by batch size."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._thread = get_ident()
        self._batches: weakref.WeakKeyDictionary[Any, dict[int | None, list[Any]]] = weakref.WeakKeyDictionary()
        self._position: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by iterator

    def wrap(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The replacement of the method that gets an iterator's next batch."""

        @functools.wraps(original)
        def _next_data(iterator: Any) -> Any:
            if get_ident() != self._thread:
                return original(iterator)
            try:
                batches = self._batches.setdefault(iterator._index_sampler, {})
            except TypeError:  # a list of batches
                return original(iterator)
            return self._next(iterator, batches, original)

        return _next_data

    def _next(self, iterator: Any, batches: dict[int | None, list[Any]], original: Callable[[Any], Any]) -> Any:
        if not batches:
            return self._load(iterator, batches, original)
        position = self._position.get(iterator, 0)
        self._position[iterator] = position + 1
        first = next(iter(batches.values()))
        if position < 0:  # the batches loaded for this iterator at its beginning
            return _copied(first[position])
        index = iterator._next_index()  # raises StopIteration at the end of the epoch
        size = len(index) if isinstance(index, list | tuple) else None
        if size not in batches and size is not None and hasattr(iterator, "_dataset_fetcher"):
            batches[size] = [_copied(iterator._dataset_fetcher.fetch(index), self._device)]  # the last of an epoch
        alike = batches.get(size, first)
        return _copied(alike[position % len(alike)])

    def _load(self, iterator: Any, batches: dict[int | None, list[Any]], original: Callable[[Any], Any]) -> Any:
        """The first batches of a loader, at its first request."""
        loaded: list[Any] = []
        for _ in range(BATCHES):
            try:
                loaded.append(_copied(original(iterator), self._device))
            except StopIteration:
                if not loaded:
                    raise
                break
        batches[_usual_size(iterator, loaded[0])] = loaded
        self._position[iterator] = 1 - len(loaded)
        return _copied(loaded[0])


def _usual_size(iterator: Any, batch: Any) -> int | None:
    if not getattr(iterator, "_auto_collation", False):
        return None
    size = getattr(iterator._index_sampler, "batch_size", None)
    return size if isinstance(size, int) else samples_in(batch)


def _copied(batch: Any, device: str | None = None) -> Any:
    """A copy on `device`, by default on its own device; objects that are no tensors are copied shallowly."""
    import torch
    from torch.utils._pytree import tree_map

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.clone() if device is None else leaf.to(device, copy=True)
        if not callable(getattr(leaf, "to", None)):
            if isinstance(leaf, MutableMapping):  # of a type that pytree does not know
                mapping = copy.copy(leaf)
                mapping.update(tree_map(copied, dict(leaf)))
                return mapping
            return leaf if isinstance(leaf, str | bytes) else copy.copy(leaf)
        return copy.copy(leaf) if device is None else copy.copy(leaf).to(device)

    return tree_map(copied, batch)
