"""Files that appear whole or not at all, so that a reader beside us never sees half of one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from gpulab.errors import StoreError
from gpulab.formatting import decapitalized


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
