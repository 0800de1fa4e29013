"""What the marks of a run say so far, read on whichever thread asks: its steps, and where nothing was trained."""

from __future__ import annotations

import threading

import numpy as np

from gpulab.capture.pauses.pauses import Pauses
from gpulab.run import Int64, Steps
from gpulab.store.spool import Spool
from gpulab.store.spooled_run import MARKS
from gpulab.tape.marks import MARK, Marks, Tape
from gpulab.tape.step_finder import StepFinder


class Reader:
    """Of one run, which began at `origin_ns`; each mark costs gpulab `mark_ns`.

    An interrupt may leave it in the middle of reading. Then it begins anew: no mark is lost.
    """

    def __init__(self, tape: Tape, origin_ns: int, pauses: Pauses, mark_ns: int = 0) -> None:
        self._tape = tape
        self._origin_ns, self._mark_ns = origin_ns, mark_ns
        self._lock = threading.RLock()
        self._reads = False  # or was interrupted
        self._read = 0  # of the tape's chunks
        self._written = 0  # of these
        self._written_rows = 0
        self._spool: Spool | None = None
        self._shown = 0  # steps
        self.pauses = pauses
        self.finder = StepFinder(origin_ns, mark_ns)

    def read(self) -> StepFinder:
        """Go on to the newest mark."""
        with self._lock:
            self._tape.take()
            if self._reads:
                self._begin_anew()
            self._reads = True
            chunks = self._tape.chunks
            while self._read < len(chunks):
                self._hear(chunks[self._read])
                self._read += 1
            self._reads = False
            if self._spool is None:
                return self.finder
            self._drop()
            return self.finder

    def write(self, spool: Spool) -> None:
        """Append the marks that are new to the spool. From one thread of ours at a time. Raises OSError."""
        with self._lock:
            self._tape.take()
            self._spool = spool
            chunks = self._tape.chunks
            while self._written < len(chunks):
                marks = chunks[self._written]
                spool.append(MARKS, self._written_rows, marks.tobytes(), self._written_rows + len(marks))
                self._written_rows += len(marks)
                self._written += 1
            self._drop()

    def so_far(self) -> Steps:
        """The steps that have ended. From any thread."""
        with self._lock:
            return self.read().steps()

    def fresh(self) -> Int64:
        """Of steps since the last call: start, end, data wait (ns), samples (-1: unknown), [n, 4]. From any thread."""
        with self._lock:
            finder = self.read()
            rows = finder.rows_since(min(self._shown, len(finder)))
            self._shown = len(finder)
            return rows

    def finish(self, end_ns: int) -> Steps:
        """All steps; the user's code has ended at `end_ns`."""
        with self._lock:
            return self.read().steps(end_ns)

    def _hear(self, marks: Marks) -> None:
        self.finder.read(marks)
        self.pauses.read(marks)

    def _begin_anew(self) -> None:
        self.finder = StepFinder(self._origin_ns, self._mark_ns)
        self.pauses.begin_anew()
        self._read = 0
        if self._spool is not None and self._written_rows:
            dropped = self._written_rows - sum(len(chunk) for chunk in self._tape.chunks[: self._written])
            self._hear(np.array(self._spool.read().tables[MARKS][:dropped]).view(MARK))

    def _drop(self) -> None:
        """Chunks that were read and written are in the spool alone."""
        both = min(self._read, self._written)
        self._read, self._written = self._read - both, self._written - both
        del self._tape.chunks[:both]
