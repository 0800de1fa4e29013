"""What is kept of steps: the sums of the one that is going on, and a row for each that was closed."""

from __future__ import annotations

import struct

import numpy as np
from msgspec import Struct

from gpulab.run import Int64, StepFlag, Steps

EPOCH_START, PROFILER_EDGE = int(StepFlag.EPOCH_START), int(StepFlag.PROFILER_EDGE)  # plain numbers are faster
COLUMNS = (
    *("start_ns", "end_ns", "data_wait_ns", "optimizer_ns", "own_ns", "batches"),
    *("samples", "phase", "flags"),  # samples: -1: unknown
)
WIDTH = len(COLUMNS)
START, END, DATA_WAIT, OPTIMIZER, OWN, BATCHES, SAMPLES, PHASE, FLAGS = range(WIDTH)
ROWS_IN_BLOCK = 16_384
_ROW = struct.Struct(f"{WIDTH}q")
_pack_into, _ROW_BYTES = _ROW.pack_into, _ROW.size


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
        self._blocks: list[bytearray] = []
        self._newest = bytearray()

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
        self.count = 0
        self._blocks.clear()

    # -- single rows -----------------------------------------------------------------------------------------------

    def row(self, number: int) -> tuple[int, ...]:
        """All its numbers. Raises IndexError."""
        block, at = self._place(number)
        return _ROW.unpack_from(block, at)

    def value(self, number: int, column: int) -> int:
        """One of its numbers. Raises IndexError."""
        return self.row(number)[column]

    def last(self) -> tuple[int, int, int, int]:
        """Start, end, data wait (ns) and samples (-1 unknown) of the newest row. Raises IndexError without one."""
        start, end, wait, _, _, _, samples, _, _ = self.row(-1)
        return start, end, wait, samples

    def add_flags(self, number: int, flags: int) -> None:
        self._change(number, {FLAGS: self.value(number, FLAGS) | flags})

    def _place(self, number: int) -> tuple[bytearray, int]:
        if number < 0:
            number += self.count
        if not 0 <= number < self.count:
            raise IndexError(number)
        block, at = divmod(number, ROWS_IN_BLOCK)
        return self._blocks[block], at * _ROW_BYTES

    def _change(self, number: int, values: dict[int, int]) -> None:
        block, at = self._place(number)
        row = _ROW.unpack_from(block, at)
        _pack_into(block, at, *(values.get(column, value) for column, value in enumerate(row)))

    # -- rows that turn out to be something else -------------------------------------------------------------------

    def since_epoch(self) -> int:
        """Rows since the newest epoch began: all of them where none did."""
        newest = next((i for i in reversed(range(self.count)) if self.value(i, FLAGS) & EPOCH_START), 0)
        return self.count - newest

    def lead_into(self, step: OpenStep, count: int) -> None:
        """Add the newest `count` rows to the open step: they were its beginning."""
        if not count:
            return
        rows = self._table()[-count:]
        known = np.maximum(rows[:, SAMPLES], 0)
        step.start_ns = int(rows[0, START])
        step.data_wait_ns += int(rows[:, DATA_WAIT].sum())
        step.optimizer_ns += int(rows[:, OPTIMIZER].sum())
        step.own_ns += int(rows[:, OWN].sum())
        step.batches += int(rows[:, BATCHES].sum())
        step.samples += int(known.sum())
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

    # -- all rows --------------------------------------------------------------------------------------------------

    def _table(self) -> Int64:
        """All rows, [n, 9]; a copy."""
        count = self.count
        table = np.empty((count, WIDTH), np.int64)
        for first in range(0, count, ROWS_IN_BLOCK):
            rows = np.frombuffer(self._blocks[first // ROWS_IN_BLOCK], np.int64).reshape(-1, WIDTH)
            table[first : first + ROWS_IN_BLOCK] = rows[: count - first]
        return table

    def steps(self, origin_ns: int) -> Steps:
        """All rows, on a clock that starts at `origin_ns`."""
        if self.count:
            self.add_flags(0, int(StepFlag.FIRST))
            self.add_flags(-1, int(StepFlag.LAST))
        table = self._table()
        column = dict(zip(COLUMNS, np.ascontiguousarray(table.T), strict=True))
        del table
        start, end = column["start_ns"] - origin_ns, column["end_ns"] - origin_ns
        wall = end - start
        wait = np.minimum(column["data_wait_ns"], wall)
        return Steps(
            number=np.arange(1, self.count + 1, dtype=np.int64),
            start_ns=start,
            end_ns=end,
            data_wait_ns=wait,
            optimizer_ns=np.minimum(column["optimizer_ns"], wall),
            batch_count=column["batches"].copy(),
            sample_count=column["samples"].copy(),
            phase=column["phase"].astype(np.uint8),
            flags=column["flags"].astype(np.uint8),
            own_ns=np.minimum(column["own_ns"], wall - wait),
        )
