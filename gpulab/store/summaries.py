"""The summary in the folder of a stored run, so that thousands of runs are listed without opening any."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

from gpulab.errors import StoreError
from gpulab.run_summary import VERSION, RunSummary
from gpulab.store.files import reason, write_whole
from gpulab.store.folders import DOCUMENT, RUNNING_PREFIX

FILE = "summary.json"
RUNS, LAB = "runs", ".gpulab"
_decode = msgspec.json.Decoder(RunSummary).decode
_NO_STORES = frozenset({"__pycache__", "node_modules", "site-packages"})
_DEEPEST = 6  # levels of folders between the given one and a store


def keep_summary(folder: Path, summary: RunSummary) -> None:
    """Store a summary in its run's folder. If that fails, readers compute it again."""
    with contextlib.suppress(StoreError, UnicodeEncodeError):
        write_whole(folder / FILE, msgspec.json.encode(summary))


def rename_summary(folder: Path, name: str) -> None:
    """Rename the run in its summary, too."""
    summary = _read(os.path.join(folder, FILE))
    if summary is not None:
        keep_summary(folder, msgspec.structs.replace(summary, name=name))


def stored_runs(root: Path) -> Iterator[tuple[Path, str, RunSummary | None]]:
    """The folder of every run of a store, its owner, and its summary: None if there is none of this version.

    No run is opened. Raises StoreError if the store cannot be read.
    """
    try:
        with os.scandir(root) as folders:
            for folder in folders:
                try:
                    if folder.name.startswith(".") or not folder.is_dir():
                        continue
                    user = _user_name(folder.stat(follow_symlinks=False).st_uid)
                except FileNotFoundError:  # deleted just now
                    continue
                yield Path(folder.path), user, _read(os.path.join(folder.path, FILE))
    except OSError as e:
        raise StoreError(f"The run store {str(root)!r} cannot be read: {reason(e)}.") from e


def stores_in(folder: Path) -> list[Path]:
    """The folder itself if it is a store, else the stores below it: `.gpulab/runs`, up to six levels down.

    Raises StoreError if there is none.
    """
    if not folder.is_dir():
        raise StoreError(f"There is no folder {str(folder)!r}: check the path.")
    if _is_store(folder):
        return [folder]
    near = [place for place in (folder / RUNS, folder / LAB / RUNS) if _is_store(place)]
    below = sorted(set(near) | set(_below(folder)))
    if not below:
        raise StoreError(f"No runs in {str(folder)!r}: name a folder that contains {LAB}/{RUNS}, or runs.")
    return below


def _is_store(folder: Path) -> bool:
    """Whether the folder has runs: a folder may have only the name of a store, as TensorBoard's `runs`."""
    if folder.name == RUNS and folder.parent.name == LAB:
        return folder.is_dir()
    try:
        with os.scandir(folder) as entries:
            return any(
                e.name.startswith(RUNNING_PREFIX) or os.path.isfile(os.path.join(e.path, DOCUMENT)) for e in entries
            )
    except OSError:
        return False


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, _ in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        if LAB in folders and os.path.isdir(os.path.join(place, LAB, RUNS)):
            yield Path(place, LAB, RUNS)
        folders[:] = [f for f in folders if not f.startswith(".") and f not in _NO_STORES] if depth < _DEEPEST else []


@cache
def _user_name(number: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(number).pw_name
    except (ImportError, KeyError):
        return str(number)


def _read(path: str) -> RunSummary | None:
    try:
        with open(path, "rb") as file:
            summary = _decode(file.read())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return summary if summary.version == VERSION else None
