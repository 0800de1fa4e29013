"""A folder that is gone with its process: where that was killed, when the next one makes such a folder."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpulab.store.table_file import left_behind, lock

LOCK = ".held"


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder for temporary files, which is deleted afterwards.

    Those of the same prefix are deleted, too, whose process has ended without. Raises OSError where none can be made.
    """
    _sweep(Path(tempfile.gettempdir()), prefix)
    folder, file = _begun(prefix)
    try:
        yield folder
    finally:
        os.close(file)
        shutil.rmtree(folder, ignore_errors=True)


def _begun(prefix: str) -> tuple[Path, int]:
    """A folder whose lock is ours. Another process may sweep it before it is locked: then the next one is."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue
        if lock(file) is not False and (folder / LOCK).exists():  # None: no file can be locked here
            return folder, file
        os.close(file)


def _sweep(root: Path, prefix: str) -> None:
    for folder in root.glob(f"{prefix}*"):
        with left_behind(folder / LOCK, math.inf) as ours, suppress(OSError):  # one without is just being made
            if ours:
                (folder / LOCK).unlink()  # the one who makes it sees that it is gone
                shutil.rmtree(folder, ignore_errors=True)
