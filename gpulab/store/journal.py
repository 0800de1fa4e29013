"""A run's folder from its first second on: hidden while the run goes on, it is the run where its process is killed."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from msgspec.structs import replace

from gpulab.run import Missing, Run
from gpulab.store import run_format
from gpulab.store.folders import COLUMNS, DOCUMENT, KILLED, RUNNING_PREFIX
from gpulab.store.run_tables import ORIGIN, TABLES
from gpulab.store.table_file import Writer

UNFINISHED = f".{DOCUMENT}"


class Journal(Writer):
    """Of one run. Its tables grow; its document is written again whenever more of it is known."""

    def __init__(self, root: Path, run_id: str, origin_ns: int) -> None:
        about = {"process": os.getpid(), "host": socket.gethostname(), ORIGIN: origin_ns}
        super().__init__(root / f"{RUNNING_PREFIX}{run_id}" / COLUMNS, TABLES, about)

    def write_document(self, run: Run) -> None:
        """The run without its columns, as it is if its process is killed from now on. Raises OSError."""
        self.begin()
        lacking = Missing(
            "step breakdown and kernels",
            f"{KILLED}: measurements are kept up to its last second, but no trace",
            key="breakdown",
        )
        missing = (*run.missing, lacking)
        document = run_format.encode_header(replace(run, outcome="interrupted", outcome_detail=KILLED, missing=missing))
        unfinished = self.path.with_name(UNFINISHED)
        unfinished.write_bytes(document)
        os.replace(unfinished, self.path.with_name(DOCUMENT))

    def remove(self) -> None:
        """The folder with all that is in it. May be called twice."""
        if self._file < 0:
            return
        self.close()
        for name in (UNFINISHED, DOCUMENT, COLUMNS):
            with contextlib.suppress(OSError):
                self.path.with_name(name).unlink()
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()
