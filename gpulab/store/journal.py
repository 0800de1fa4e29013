"""A run's folder from its first second on: hidden while the run goes on, it is the run where its process is killed.

It is brought up to date once a second, in a thread of its own: no other part of a run delays it.
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
END_TIMEOUT_S = 5.0  # of a thread that writes: it may wait for what a signal has interrupted


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
        document = encode_header(replace(run, outcome="interrupted", outcome_detail=KILLED, missing=missing))
        unfinished = self.path.with_name(f".{DOCUMENT}")
        unfinished.write_bytes(document)
        os.replace(unfinished, self.path.with_name(DOCUMENT))

    def remove(self) -> None:
        """The folder with all that is in it. May be called twice."""
        if self._file >= 0:
            self.close()
            shutil.rmtree(self.path.parent, ignore_errors=True)


class JournalWriter:
    """Brings a journal up to date. `write` appends what is new; without a `journal` it stays in memory.

    After a failure the run goes on in memory, and a second later there is another try.
    """

    def __init__(self, journal: Journal | None, write: Callable[[Journal], None]) -> None:
        self._journal = journal
        self._write = write
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_rows = False
        self._is_over = False
        self.problems: tuple[Choice, ...] = ()  # of the last try, for the record: none, or one

    def start(self) -> None:
        """Begin to write, for the first time in a second."""
        if self._journal is not None:
            self._thread = threading.Thread(target=self._run, name="gpulab-journal", daemon=True)
            self._thread.start()

    def update(self) -> None:
        """Write what is new, unless another thread does so just now. From any thread of ours; never raises."""
        if self._lock.acquire(blocking=False):
            try:
                self._update()
            finally:
                self._lock.release()

    def stop(self) -> None:
        """Write the last of it where there was a first: storing the run takes a while. Nothing is written after it."""
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
        """Remove the journal, once all of it was read back. May be called twice."""
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
