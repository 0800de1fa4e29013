"""What the marks of a run say so far, read on whichever thread asks: its steps, and where nothing was trained."""

from __future__ import annotations

import threading

from gpulab.capture.pauses import Pauses
from gpulab.run import Int64, Steps
from gpulab.store.journal import Journal
from gpulab.store.run_format import MARKS
from gpulab.tape.marks import Marks, Tape
from gpulab.tape.step_finder import StepFinder


class Reader:
    """Of one run, which began at `origin_ns`; each mark costs gpulab `mark_ns`.

    An interrupt may leave it in the middle of reading. Then it begins anew: no mark is lost. After a `fault` of ours
    nothing more is read.
    """

    def __init__(self, tape: Tape, origin_ns: int, pauses: Pauses, mark_ns: int = 0) -> None:
        self._tape = tape
        self._origin_ns, self._mark_ns = origin_ns, mark_ns
        self._lock = threading.RLock()
        self._reads = False  # or was interrupted
        self.fault: Exception | None = None
        self._read = 0  # of the tape's chunks
        self._written = 0  # of these
        self._dropped = 0  # marks, in the journal alone
        self._journal: Journal | None = None
        self._shown = 0  # steps
        self.pauses = pauses
        self.finder = StepFinder(origin_ns, mark_ns)

    def read(self) -> StepFinder:
        """Go on to the newest mark."""
        with self._lock:
            self._tape.pack()
            try:
                if self.fault is None:
                    self._go_on()
            except Exception as e:
                self.fault = e
            return self.finder

    def _go_on(self) -> None:
        if self._reads:
            self._begin_anew()
        self._reads = True
        chunks = self._tape.chunks
        while self._read < len(chunks):
            self._hear(chunks[self._read])
            self._read += 1
        self._reads = False
        self._drop()

    def write(self, journal: Journal) -> None:
        """Append the marks that are new to the journal. From one thread of ours at a time. Raises OSError."""
        with self._lock:
            self._tape.pack()
            self._journal = journal
            chunks = self._tape.chunks[self._written :]
        for marks in chunks:  # the training thread may wait for the lock, and never for the disk
            journal.append(MARKS, marks.tobytes())
            with self._lock:
                self._written += 1
        with self._lock:
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
        if self._journal is not None and self._dropped:
            self._hear(self._journal.read().tables[MARKS][: self._dropped])

    def _drop(self) -> None:
        """Chunks that were read and written are in the journal alone."""
        both = min(self._read, self._written)
        self._dropped += sum(len(marks) for marks in self._tape.chunks[:both])
        self._read, self._written = self._read - both, self._written - both
        del self._tape.chunks[:both]
