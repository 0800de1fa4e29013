"""Files for other processes: each appears whole or not at all, and a lock on it tells whether its process lives."""

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
    """Write a file that is not there yet, onto the disk. Raises OSError."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_whole(path: Path, content: bytes) -> None:
    """Put this content in the file's place; its time of change stays as it was. Raises OSError."""
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
    """Write a file that a user named, in place of one that is there. Raises StoreError with the reason."""
    require_no_folder(path)
    unfinished = path.with_name(f".gpulab-{os.urandom(6).hex()}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    except (OSError, ValueError) as e:  # ValueError: a zero byte in the name
        raise StoreError(f"{str(path)!r} cannot be written: {reason(e)}.") from e
    finally:
        with contextlib.suppress(OSError, ValueError):
            unfinished.unlink(missing_ok=True)


def require_no_folder(path: Path) -> None:
    """Raises StoreError where a file's name is that of a folder."""
    if not path.name or os.path.isdir(path):
        raise StoreError(f"{str(path)!r} is a folder: name a file in it.")


def make_folder(path: Path) -> None:
    """Make a folder that a user named, unless it is there. Raises StoreError with the reason."""
    if os.path.exists(path) and not os.path.isdir(path):
        raise StoreError(f"{str(path)!r} is a file: name a folder.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        raise StoreError(f"The folder {str(path)!r} cannot be created: {reason(e)}.") from e


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder onto the disk, where the platform can."""
    with contextlib.suppress(OSError):  # not every platform opens a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def size_bytes(folder: Path) -> int:
    """Of all files in a folder; what goes away meanwhile does not count."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def reason(error: Exception) -> str:
    """Why it failed, in the words of the system, to stand after a colon."""
    if isinstance(error, OSError) and error.strerror:
        return decapitalized(error.strerror)
    return str(error) or type(error).__name__


def lock(file: int) -> bool | None:
    """Whether nobody else has the file locked; it is locked then. None where this file system knows no locks."""
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
    """Whether the writer of a file has ended and nobody else takes care of it; inside, nobody else does.

    Where files cannot be locked: whether it was not written to for `stale_s`.
    """
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:  # gone meanwhile, or not ours
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

    Those of the same prefix are deleted, too, whose process has ended without. Raises OSError where none can be made.
    """
    import tempfile

    for other in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with orphaned(other / LOCK, math.inf) as ours, contextlib.suppress(OSError):  # without one: just being made
            if ours:
                (other / LOCK).unlink()  # the one who makes it sees that it is gone
                shutil.rmtree(other, ignore_errors=True)
    folder, file = _locked_folder(prefix)
    try:
        yield folder
    finally:
        os.close(file)
        shutil.rmtree(folder, ignore_errors=True)


def _locked_folder(prefix: str) -> tuple[Path, int]:
    """A folder whose lock is ours. Another process may delete it before it is locked: then the next one is."""
    import tempfile

    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue
        if lock(file) is not False and (folder / LOCK).exists():  # None: no file can be locked here
            return folder, file
        os.close(file)
