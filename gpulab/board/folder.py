"""The class folder: one file per learner, which they write while it is read."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

from gpulab.errors import UsageError
from gpulab.lessons.progress import Line, read_lines
from gpulab.store.files import reason

MOST_FILES = 1_000


def read_folder(folder: Path) -> Mapping[str, list[Line]]:
    """The lines of every learner by the name of their file. Raises UsageError where the folder cannot be read."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".jsonl")
    except OSError as e:
        raise UsageError(f"The class folder {str(folder)!r} cannot be read: {reason(e)}.") from e
    return {
        path.stem: list(read_lines(path)) for path in paths[:MOST_FILES] if path.is_file() and not path.is_symlink()
    }


def warning(folder: Path) -> str:
    """What is unsafe about the folder: a learner may take away another's file. Empty where nothing is."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return ""
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return f"Every learner can delete the others' files here: chmod +t {folder} ends that."
    return ""
