"""Reads the marks of a run while it goes on, on any thread: its steps, and the pauses of its training."""

from __future__ import annotations

import threading

from gpulab.capture.pauses import Pauses
from gpulab.run import Int64, Steps
from gpulab.store.journal import Journal
from gpulab.store.run_format import MARKS
from gpulab.tape.marks import Marks, Tape
from gpulab.tape.step_finder import StepFinder


class Reader:
    """The reader of one run, which began at `origin_ns`; each mark costs gpulab `mark_ns`.

    If an interrupt stops it in the middle of reading, it starts over, so that no mark is lost. After a `fault`
    it reads nothing more.
    """

    def __init__(self, tape: Tape, origin_ns: int, pauses: Pauses, mark_ns: int = 0) -> None:
        self._tape = tape
        self._origin_ns, self._mark_ns = origin_ns, mark_ns
        self._lock = threading.RLock()
        self._is_reading = False  # also after an interrupt
        self.fault: Exception | None = None
        self._read_count = 0  # number of the tape's chunks that were read
        self._journal_count = 0  # number of chunks that the journal has
        self._dropped = 0  # marks that only the journal has
        self._journal: Journal | None = None
        self._live_count = 0  # steps that `fresh` has returned
        self.pauses = pauses
        self.finder = StepFinder(origin_ns, mark_ns)

    def read(self) -> StepFinder:
        """Read up to the newest mark."""
        with self._lock:
            self._tape.pack()
            try:
                if self.fault is None:
                    self._go_on()
            except Exception as e:
                self.fault = e
            return self.finder

    def _go_on(self) -> None:
        if self._is_reading:
            self._start_over()
        self._is_reading = True
        chunks = self._tape.chunks
        while self._read_count < len(chunks):
            self._interpret(chunks[self._read_count])
            self._read_count += 1
        self._is_reading = False
        self._drop()

    def write(self, journal: Journal) -> None:
        """Append new marks to the journal. From one thread of gpulab at a time. Raises OSError."""
        with self._lock:
            self._tape.pack()
            self._journal = journal
            chunks = self._tape.chunks[self._journal_count :]
        for marks in chunks:  # the training thread may wait for the lock, but never for the disk
            journal.append(MARKS, marks.tobytes())
            with self._lock:
                self._journal_count += 1
        with self._lock:
            self._drop()

    def so_far(self) -> Steps:
        """The steps that have ended. From any thread."""
        with self._lock:
            return self.read().steps()

    def fresh(self) -> Int64:
        """Steps since the last call: start, end, data wait (ns), samples (-1: unknown), [n, 4]. From any thread."""
        with self._lock:
            finder = self.read()
            rows = finder.rows_since(min(self._live_count, len(finder)))
            self._live_count = len(finder)
            return rows

    def finish(self, end_ns: int) -> Steps:
        """All steps; the user's code ended at `end_ns`."""
        with self._lock:
            return self.read().steps(end_ns)

    def _interpret(self, marks: Marks) -> None:
        self.finder.read(marks)
        self.pauses.read(marks)

    def _start_over(self) -> None:
        self.finder = StepFinder(self._origin_ns, self._mark_ns)
        self.pauses.begin_anew()
        self._read_count = 0
        if self._journal is not None and self._dropped:
            self._interpret(self._journal.read().tables[MARKS][: self._dropped])

    def _drop(self) -> None:
        """Drop the chunks that were read and that the journal has."""
        both = min(self._read_count, self._journal_count)
        self._dropped += sum(len(marks) for marks in self._tape.chunks[:both])
        self._read_count, self._journal_count = self._read_count - both, self._journal_count - both
        del self._tape.chunks[:both]
