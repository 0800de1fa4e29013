"""Traces that were read before open at once: their columns are kept under the user's cache folder.

A trace itself is never written to, nor is anything put beside it. A file is known by its place on the disk, its size
and its times, so that a changed one is read again; so is every file after an update of gpulab. The folder is
`$GPULAB_CACHE_DIR`, else `gpulab` in the user's cache folder; it may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpulab.run import Run

KEPT_FROM_BYTES = 1 << 20  # of the file: a smaller one is read again as fast
MOST_BYTES = 2 << 30  # of the whole folder: what was not opened for longest goes first
_PACKAGE = Path(__file__).parent.parent
_READERS = ("run.py", "trace", "timeline", "store/run_format.py", "store/table_file.py")  # what makes a run of a file


def folder() -> Path:
    """Where traces are kept."""
    named = os.environ.get("GPULAB_CACHE_DIR")
    if named:
        return Path(named) / "traces"
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "gpulab" / "traces"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "gpulab" / "traces"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "gpulab" / "traces"


def find(path: Path) -> Run | None:
    """The run of this file, as it was read before; None where it was not, or what was kept is damaged."""
    from msgspec.structs import replace

    from gpulab.errors import StoreError
    from gpulab.store import run_format
    from gpulab.store.folders import COLUMNS, DOCUMENT

    key = _key(path)
    if key is None:
        return None
    kept = folder() / key
    try:
        with (kept / COLUMNS).open("rb") as columns:
            run = run_format.decode((kept / DOCUMENT).read_bytes(), columns)
        os.utime(kept)
    except FileNotFoundError:
        return None
    except (OSError, StoreError):
        shutil.rmtree(kept, ignore_errors=True)
        return None
    return run if run.origin is None else replace(run, origin=replace(run.origin, path=str(path)))


def keep(path: Path, run: Run) -> None:
    """Keep the columns of a large file. Where that fails, it will be read again."""
    from gpulab.store import run_format
    from gpulab.store.folders import COLUMNS, DOCUMENT

    key = _key(path)
    if key is None:
        return
    root = folder()
    unfinished = root / f".saving-{os.urandom(6).hex()}"
    with contextlib.suppress(OSError):
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            unfinished.mkdir(mode=0o700)
            with (unfinished / COLUMNS).open("xb") as columns:
                document = run_format.encode_into(run, columns)
            (unfinished / DOCUMENT).write_bytes(document)
            os.rename(unfinished, root / key)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        _make_room(root)


def _key(path: str | Path) -> str | None:
    """None for a small file, and for what is no file."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    if state.st_size < KEPT_FROM_BYTES or not os.path.isfile(path):
        return None
    name = zlib.crc32(os.path.basename(path).encode("utf-8", "surrogateescape"))  # which names the run
    times = f"{state.st_size:x}-{state.st_mtime_ns:x}-{state.st_ctime_ns:x}"
    return f"{state.st_dev:x}-{state.st_ino:x}-{times}-{name:x}-{_readers():x}"


def _readers() -> int:
    """Changes with whatever turns a file into a run."""
    files = [file for name in _READERS for file in _files(_PACKAGE / name)]
    states = [(os.path.basename(file), *os.stat(file)[6:9:2]) for file in files]
    return zlib.crc32(repr(sorted(states)).encode())


def _files(path: Path) -> list[str]:
    return [entry.path for entry in os.scandir(path) if entry.name.endswith(".py")] if path.is_dir() else [str(path)]


def _make_room(root: Path) -> None:
    from gpulab.store.files import size_bytes

    entries = sorted((e for e in root.iterdir() if e.is_dir()), key=lambda e: e.stat().st_mtime)
    sizes = {entry: size_bytes(entry) for entry in entries}
    for entry in entries:
        if sum(sizes.values()) <= MOST_BYTES:
            return
        shutil.rmtree(entry, ignore_errors=True)
        del sizes[entry]
