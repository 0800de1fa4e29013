"""Files that other processes read: written atomically, and locked while their writer lives."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from gpulab.errors import StoreError
from gpulab.formatting import decapitalized

LOCK = ".held"  # in a temporary folder


def write_new(path: Path, content: bytes) -> None:
    """Write a new file and flush it to the disk. Raises OSError."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically; its modification time is kept. Raises OSError."""
    unfinished = path.with_name(f".{path.name}-{os.urandom(3).hex()}")
    try:
        write_new(unfinished, content)
        with contextlib.suppress(FileNotFoundError):
            before = path.stat()
            os.utime(unfinished, ns=(before.st_atime_ns, before.st_mtime_ns))
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that a user named, atomically. Raises StoreError with the reason."""
    check_target(path)
    unfinished = path.with_name(f".gpulab-{os.urandom(6).hex()}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    except (OSError, ValueError) as e:  # ValueError: a zero byte in the name
        raise StoreError(f"{str(path)!r} cannot be written: {reason(e)}.") from e
    finally:
        with contextlib.suppress(OSError, ValueError):
            unfinished.unlink(missing_ok=True)


def check_target(path: Path) -> None:
    """Raises StoreError if the path of a file is a folder, or its folder does not exist."""
    if not path.name or os.path.isdir(path):
        raise StoreError(f"{str(path)!r} is a folder: name a file in it.")
    if not os.path.isdir(path.absolute().parent):
        raise StoreError(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}.")


def make_folder(path: Path) -> None:
    """Create a folder that a user named, if need be. Raises StoreError with the reason."""
    if os.path.exists(path) and not os.path.isdir(path):
        raise StoreError(f"{str(path)!r} is a file: name a folder.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        raise StoreError(f"The folder {str(path)!r} cannot be created: {reason(e)}.") from e


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, if the platform can."""
    with contextlib.suppress(OSError):  # not every platform opens a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def size_bytes(folder: Path) -> int:
    """The size of all files in a folder, without files that disappear meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def reason(error: Exception) -> str:
    """The system's reason for an error, for use after a colon."""
    if isinstance(error, OSError) and error.strerror:
        return decapitalized(error.strerror)
    return str(error) or type(error).__name__


def lock(file: int) -> bool | None:
    """Try to lock a file; returns whether it succeeded, None if the file system has no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def orphaned(path: Path, stale_s: float) -> Iterator[bool]:
    """Yields whether the writer of a file has ended; the file is locked in the block, so only one process handles it.

    If files cannot be locked: yields whether it was last written more than `stale_s` seconds ago.
    """
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:  # deleted meanwhile, or of another user
        yield False
        return
    try:
        locked, status = lock(file), os.fstat(file)
        if locked is None:
            locked = time.time() - status.st_mtime > stale_s
        yield locked and path.exists() and os.path.samestat(os.stat(path), status)
    finally:
        os.close(file)


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder for temporary files, which is deleted afterwards.

    Folders with the same prefix whose process has died are deleted, too. Raises OSError if none can be created.
    """
    import tempfile

    for other in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with orphaned(other / LOCK, math.inf) as ours, contextlib.suppress(OSError):  # no lock yet: it is being created
            if ours:
                (other / LOCK).unlink()  # its creator will notice the loss
                shutil.rmtree(other, ignore_errors=True)
    folder, file = _locked_folder(prefix)
    try:
        yield folder
    finally:
        os.close(file)
        shutil.rmtree(folder, ignore_errors=True)


def _locked_folder(prefix: str) -> tuple[Path, int]:
    """A new folder with a lock. Another process may delete it before it is locked: then the creation is repeated."""
    import tempfile

    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue
        if lock(file) is not False and (folder / LOCK).exists():  # None: files cannot be locked here
            return folder, file
        os.close(file)
