"""The folder of a run in progress, from which the run is recovered if its process is killed.

A separate thread updates it once a second, so that no other part of a run delays the updates.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from gpulab.run import Choice, Missing, Run
from gpulab.store.files import reason
from gpulab.store.folders import COLUMNS, DOCUMENT, KILLED, RUNNING_PREFIX
from gpulab.store.run_format import ORIGIN, TABLES, encode_header
from gpulab.store.table_file import Writer

PERIOD_S = 1.0
END_TIMEOUT_S = 5.0  # for a writing thread: a signal may have interrupted its lock's holder


class Journal(Writer):
    """The journal of one run. Its tables grow; its document is replaced whenever more is known."""

    def __init__(self, root: Path, run_id: str, origin_ns: int) -> None:
        about = {"process": os.getpid(), "host": socket.gethostname(), ORIGIN: origin_ns}
        super().__init__(root / f"{RUNNING_PREFIX}{run_id}" / COLUMNS, TABLES, about)

    def write_document(self, run: Run) -> None:
        """Write the run without its columns, in the state to recover if its process is killed. Raises OSError."""
        self.begin()
        lacking = Missing(
            "step breakdown and kernels",
            f"{KILLED}: measurements are kept up to its last second, but no trace",
            key="breakdown",
        )
        missing = (*run.missing, lacking)
        document = encode_header(replace(run, outcome="interrupted", outcome_detail=KILLED, missing=missing))
        unfinished = self.path.with_name(f".{DOCUMENT}")
        unfinished.write_bytes(document)
        os.replace(unfinished, self.path.with_name(DOCUMENT))

    def remove(self) -> None:
        """Remove the folder. May be called twice."""
        if self._file >= 0:
            self.close()
            shutil.rmtree(self.path.parent, ignore_errors=True)


class JournalWriter:
    """Updates a journal. `write` appends the new rows; without a `journal` the run stays in memory.

    After a failure the run continues in memory, and the update is tried again a second later.
    """

    def __init__(self, journal: Journal | None, write: Callable[[Journal], None]) -> None:
        self._journal = journal
        self._write = write
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_rows = False
        self._is_over = False
        self.problems: tuple[Choice, ...] = ()  # of the last try: at most one

    def start(self) -> None:
        """Start the thread; its first update is a second later."""
        if self._journal is not None:
            self._thread = threading.Thread(target=self._run, name="gpulab-journal", daemon=True)
            self._thread.start()

    def update(self) -> None:
        """Write the new rows, unless another thread is doing so. May be called from any gpulab thread; never raises."""
        if self._lock.acquire(blocking=False):
            try:
                self._update()
            finally:
                self._lock.release()

    def stop(self) -> None:
        """Write the last rows, if any were written before, as storing the run takes a while. Then write no more."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(END_TIMEOUT_S)
        if self._lock.acquire(timeout=END_TIMEOUT_S):
            try:
                if self._has_rows:
                    self._update()
                self._is_over = True
            finally:
                self._lock.release()

    def close(self) -> None:
        """Stop and remove the journal. May be called twice."""
        self.stop()
        if self._journal is not None:
            self._journal.remove()

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self.update()

    def _update(self) -> None:
        if self._journal is None or self._is_over:
            return
        try:
            self._write(self._journal)
            self._has_rows, self.problems = True, ()
        except Exception as e:
            why = f"they could not be written to {str(self._journal.path.parent.parent)!r}: {reason(e)}"
            self.problems = (Choice("steps so far", "kept in memory", why),)
