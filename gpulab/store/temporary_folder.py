"""A folder that is gone with its process: where that was killed, when the next one makes such a folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpulab.store.spool import lock

LOCK = ".held"


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder for temporary files, which is deleted afterwards.

    Those of the same prefix are deleted, too, whose process has ended without. Raises OSError where none can be made.
    """
    _sweep(Path(tempfile.gettempdir()), prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock(file)  # the system unlocks it when this process ends, however it does
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(file)


def _sweep(root: Path, prefix: str) -> None:
    for folder in root.glob(f"{prefix}*"):
        with suppress(OSError):
            file = os.open(folder / LOCK, os.O_RDWR)  # one without is just being made
            try:
                if lock(file):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(file)
