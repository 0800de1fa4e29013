"""What is kept of steps: the sums of the one that is going on, and a row for each that was closed.

Only the newest rows stay in memory where a thread of ours writes them to a journal now and then. It never makes the
training thread wait for the disk, but where steps turn out to be none, which happens at most a few times in a run.
"""

from __future__ import annotations

import struct
import threading
from collections import deque

import numpy as np
from msgspec import Struct

from gpulab.run import Int64, StepFlag, Steps
from gpulab.store.changed_rows import CHANGES, change, clear, current
from gpulab.store.run_tables import STEP_COLUMNS, STEPS, steps_of
from gpulab.store.table_file import Writer

EPOCH_START, PROFILER_EDGE = int(StepFlag.EPOCH_START), int(StepFlag.PROFILER_EDGE)  # plain numbers are faster
WIDTH = len(STEP_COLUMNS)
START, END, DATA_WAIT, OPTIMIZER, OWN, BATCHES, SAMPLES, PHASE, FLAGS = range(WIDTH)
ROWS_IN_BLOCK = 16_384
_ROW = struct.Struct(f"{WIDTH}q")
_pack_into, _ROW_BYTES = _ROW.pack_into, _ROW.size
KEPT_BLOCKS = 2  # the newest stay in memory


class OtherStep(Struct, frozen=True, gc=False):
    """A step of another optimizer than the one that ends steps; sums are those of the open step at that time."""

    optimizer: int
    end_ns: int
    data_wait_ns: int
    optimizer_ns: int
    batches: int
    samples: int


class OpenStep(Struct, gc=False):
    """The step that is going on. Made anew for each step, so what is seldom filled starts as an empty tuple."""

    start_ns: int
    flags: int = 0
    data_wait_ns: int = 0
    own_ns: int = 0  # gpulab's own
    optimizer_ns: int = 0
    batches: int = 0
    samples: int = 0
    samples_known: bool = True
    asked: bool = False  # a loader was asked for anything
    fed: tuple[int, ...] = ()  # loaders that gave a batch, in order, each once
    guests: tuple[int, ...] = ()  # loaders begun amid an accumulation: evaluation
    ended: int | None = None  # the loader that had none left, if that was the last answer
    ended_first: bool = False  # it had none left already when the optimizer stepped
    backwards: int = 0
    optimized_ns: int | None = None  # end of the last optimizer step within
    batches_when_optimized: int = -1
    others: tuple[OtherStep, ...] = ()


class Rows:
    """Closed steps: 9 numbers each, packed by one call, which no interrupt parts and which costs a third of 9 appends.

    `count` grows once a row is whole. A row is numbered from the first one, or from the end where it is negative.
    """

    def __init__(self) -> None:
        self.count = 0
        self._blocks: list[bytearray | None] = []  # None: in the journal alone
        self._newest = bytearray()
        self._spool: Writer | None = None
        self._lock = threading.RLock()  # held while a thread of ours writes, and where rows are taken back
        self._claimed = 0  # so many rows are written or about to be: who changes one says so
        self._written = 0
        self._changed: dict[int, tuple[int, ...]] = {}  # written rows as they are now; few
        self._unwritten: deque[int] = deque()  # of these
        self._taken_back = False  # since the last writing

    def __len__(self) -> int:
        return self.count

    def append(self, step: OpenStep, end_ns: int, phase: int) -> None:
        at = self.count % ROWS_IN_BLOCK
        if not at:
            self._begin_block()
        batches = step.batches
        _pack_into(
            self._newest,
            at * _ROW_BYTES,
            step.start_ns,
            end_ns,
            step.data_wait_ns,
            step.optimizer_ns,
            step.own_ns,
            batches,
            step.samples if step.samples_known and batches else -1,
            phase,
            step.flags,
        )
        self.count += 1

    def _begin_block(self) -> None:
        del self._blocks[self.count // ROWS_IN_BLOCK :]  # one that an interrupt has left empty
        self._newest = bytearray(ROWS_IN_BLOCK * _ROW_BYTES)
        self._blocks.append(self._newest)

    def clear(self) -> None:
        with self._lock:
            self.count = self._claimed = self._written = 0
            self._blocks.clear()
            self._changed.clear()
            self._unwritten.clear()
            self._taken_back = self._spool is not None

    # -- single rows -----------------------------------------------------------------------------------------------

    def row(self, number: int) -> tuple[int, ...]:
        """All its numbers. Raises IndexError."""
        number = self._number(number)
        changed = self._changed.get(number)
        if changed is not None:
            return changed
        block = self._blocks[number // ROWS_IN_BLOCK]
        if block is None:
            row = self._table()[number]
            return tuple(row.tolist())
        return _ROW.unpack_from(block, number % ROWS_IN_BLOCK * _ROW_BYTES)

    def value(self, number: int, column: int) -> int:
        """One of its numbers. Raises IndexError."""
        return self.row(number)[column]

    def last(self) -> tuple[int, int, int, int]:
        """Start, end, data wait (ns) and samples (-1 unknown) of the newest row. Raises IndexError without one."""
        if not self.count:
            raise IndexError("no row")
        at = (self.count - 1) % ROWS_IN_BLOCK * _ROW_BYTES
        start, end, wait, _, _, _, samples, _, _ = _ROW.unpack_from(self._newest, at)
        return start, end, wait, samples

    def add_flags(self, number: int, flags: int) -> None:
        self._change(number, {FLAGS: self.value(number, FLAGS) | flags})

    def _number(self, number: int) -> int:
        if number < 0:
            number += self.count
        if not 0 <= number < self.count:
            raise IndexError(number)
        return number

    def _change(self, number: int, values: dict[int, int]) -> None:
        number = self._number(number)
        row = tuple(values.get(column, value) for column, value in enumerate(self.row(number)))
        block = self._blocks[number // ROWS_IN_BLOCK]
        if block is not None:
            _pack_into(block, number % ROWS_IN_BLOCK * _ROW_BYTES, *row)
        if number < self._claimed:  # asked last: what is claimed meanwhile is written as it is now
            self._changed[number] = row
            self._unwritten.append(number)

    # -- rows that turn out to be something else -------------------------------------------------------------------

    def since_epoch(self) -> int:
        """Rows since the newest epoch began: all of them where none did."""
        begun = np.flatnonzero(self._table()[:, FLAGS] & EPOCH_START)
        return self.count - (int(begun[-1]) if len(begun) else 0)

    def lead_into(self, step: OpenStep, count: int) -> None:
        """Add the newest `count` rows to the open step: they were its beginning."""
        if not count:
            return
        rows = self._table()[-count:]
        step.start_ns = int(rows[0, START])
        step.data_wait_ns += int(rows[:, DATA_WAIT].sum())
        step.optimizer_ns += int(rows[:, OPTIMIZER].sum())
        step.own_ns += int(rows[:, OWN].sum())
        step.batches += int(rows[:, BATCHES].sum())
        step.samples += int(np.maximum(rows[:, SAMPLES], 0).sum())
        step.samples_known &= bool((rows[:, SAMPLES] >= 0).all())
        step.flags |= int(rows[0, FLAGS]) & EPOCH_START

    def give_batch(self, number: int, step: OpenStep) -> None:
        """One batch of a closed step belongs to the open one."""
        row = self.row(number)
        batches, samples = row[BATCHES], row[SAMPLES]
        each = samples // batches
        step.batches += 1
        if samples >= 0:
            self._change(number, {BATCHES: batches - 1, SAMPLES: samples - each})
            step.samples += each
        else:
            self._change(number, {BATCHES: batches - 1})
            step.samples_known = False

    def extend_first(self, other: OtherStep, flags: int) -> None:
        """The first row goes on to the end of that optimizer's step."""
        row = self.row(0)
        longer = {
            END: other.end_ns,
            DATA_WAIT: row[DATA_WAIT] + other.data_wait_ns,
            OPTIMIZER: row[OPTIMIZER] + other.optimizer_ns,
            FLAGS: row[FLAGS] | flags,
        }
        self._change(0, longer)

    # -- the journal -----------------------------------------------------------------------------------------------

    def write(self, spool: Writer) -> None:
        """Append what is new. From one thread of ours at a time. Raises OSError; then nothing is lost."""
        with self._lock:
            self._spool = spool
            if self._taken_back:
                spool.append(CHANGES, clear(spool.counts[STEPS], WIDTH))
                self._taken_back = False
            self._claimed = self.count
            while self._written < self._claimed:
                self._write_block(spool)
            while self._unwritten:
                number = self._unwritten[0]
                spool.append(CHANGES, change(number, self._changed[number]))
                self._unwritten.popleft()
            for number in range(self._written // ROWS_IN_BLOCK - KEPT_BLOCKS + 1):
                self._forget(number)

    def _write_block(self, spool: Writer) -> None:
        """The rows of one block that are not written."""
        first, at = self._written, self._written % ROWS_IN_BLOCK
        until = min(self._claimed, first - at + ROWS_IN_BLOCK)
        block = self._blocks[first // ROWS_IN_BLOCK]
        assert block is not None
        rows = memoryview(block)[at * _ROW_BYTES : (at + until - first) * _ROW_BYTES]
        spool.append(STEPS, rows)
        self._written = until

    def _forget(self, number: int) -> None:
        """A block is in the journal alone from now on, but for the rows that may be asked for: where an epoch began."""
        block = self._blocks[number]
        if block is None:
            return
        begun = np.flatnonzero(np.frombuffer(block, np.int64).reshape(-1, WIDTH)[:, FLAGS] & EPOCH_START)
        if len(begun):
            first = number * ROWS_IN_BLOCK + int(begun[-1])
            for row in (first, first + 1):
                self._changed.setdefault(row, self.row(row))
        self._blocks[number] = None

    # -- all rows --------------------------------------------------------------------------------------------------

    def _table(self) -> Int64:
        """All rows, [n, 9]; a copy."""
        with self._lock:
            count = self.count
            table = np.empty((count, WIDTH), np.int64)
            if self._spool is not None and None in self._blocks:
                tables = self._spool.read().tables
                rows = current(tables[STEPS], tables[CHANGES])
                table[: len(rows)] = rows[:count]
                del rows, tables
            for number, block in enumerate(self._blocks):
                first = number * ROWS_IN_BLOCK
                if block is not None and first < count:
                    rows = np.frombuffer(block, np.int64).reshape(-1, WIDTH)
                    table[first : first + ROWS_IN_BLOCK] = rows[: count - first]
            for number, row in self._changed.items():
                table[number] = row
            return table

    def so_far(self, origin_ns: int) -> Steps:
        """The same while the run goes on: no row is changed. From any thread."""
        table = self._table()
        if len(table):
            table[0, -1] |= int(StepFlag.FIRST)
        return steps_of(np.ascontiguousarray(table.T), origin_ns)

    def steps(self, origin_ns: int) -> Steps:
        """All rows, on a clock that starts at `origin_ns`."""
        if self.count:
            self.add_flags(0, int(StepFlag.FIRST))
            self.add_flags(-1, int(StepFlag.LAST))
        table = self._table()
        columns = np.ascontiguousarray(table.T)
        del table
        return steps_of(columns, origin_ns)
