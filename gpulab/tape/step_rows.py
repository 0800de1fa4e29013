"""Holds steps as rows of numbers: the open step, and a table of ended steps, whose older rows are compressed.

Compression makes them ten times smaller, so that a million steps fit into little memory. A row's `SAMPLES` are a
sum, to which a batch of unknown size adds `UNKNOWN`.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from gpulab.run import Int64, StepFlag, Steps
from gpulab.tape.marks import Kind, Marks

COLUMNS = 10
START, END, WAIT, OPTIMIZER, BATCHES, SAMPLES, OWN, PHASE, FLAGS, FEEDER = range(COLUMNS)
EPOCH_START, PROFILER_EDGE, PARTIAL = int(StepFlag.EPOCH_START), int(StepFlag.PROFILER_EDGE), int(StepFlag.PARTIAL)
COMPILED = int(StepFlag.COMPILE)
EXHAUSTED_FIRST = 1 << 8  # a flag of this module: the step's loader had no batch left when the optimizer stepped
UNKNOWN = -(1 << 40)
PACKED = 4_096  # rows in a compressed block; at least as many of the newest rows are not compressed


class OpenStep(Struct, gc=False):
    """The step that has not ended yet, and the row that it becomes. Rarely used fields are empty tuples."""

    row: list[int]
    has_request: bool = False  # some loader got a request
    feeders: tuple[int, ...] = ()  # loaders that returned a batch, in order, each once
    evaluations: tuple[int, ...] = ()  # loaders that began amid an accumulation: they evaluate
    exhausted: int | None = None  # the loader whose last answer was that it has no batch left
    exhausted_first: bool = False  # that loader had no batch left when the optimizer stepped
    backwards: int = 0  # backward passes
    optimized_ns: int | None = None  # end of the last optimizer step within
    batches_when_optimized: int = -1
    others: tuple[tuple[int, int, list[int]], ...] = ()  # steps of other optimizers: optimizer, end, the row then

    def prepend(self, rows: Int64) -> None:
        """Add rows that turn out to be the beginning of this step."""
        row = self.row
        if len(rows):
            row[START] = int(rows[0, START])
            row[FLAGS] |= int(rows[0, FLAGS]) & EPOCH_START | int(np.bitwise_or.reduce(rows[:, FLAGS])) & COMPILED
            row[WAIT:PHASE] = (rows[:, WAIT:PHASE].sum(0) + row[WAIT:PHASE]).tolist()


def open_step(start_ns: int, backwards: int = 0) -> OpenStep:
    return OpenStep([start_ns, 0, 0, 0, 0, 0, 0, 0, 0, -1], backwards=backwards)


class StepRows:
    """The rows in order; the newest of them can be withdrawn."""

    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._rows = array("q")

    def __len__(self) -> int:
        return len(self._packed) * PACKED + len(self._rows) // COLUMNS

    def append(self, row: Sequence[int]) -> None:
        self._rows.extend(row)

    def extend(self, table: Int64) -> None:
        self._rows.frombytes(table.tobytes())

    @property
    def newest(self) -> list[int]:
        """The columns of the newest row. Raises IndexError without a row."""
        if not self._rows:
            raise IndexError("no step has ended")
        return self._rows[-COLUMNS:].tolist()

    def pop(self) -> list[int]:
        """Remove the newest row and return it."""
        row = self.newest
        del self._rows[-COLUMNS:]
        return row

    def clear(self) -> None:
        self._packed.clear()
        del self._rows[:]

    def table(self, count: int = 0) -> Int64:
        """The rows from number `count` on, [n, columns]; a copy."""
        packed = min(count // PACKED, len(self._packed))
        newest = np.array(self._rows, np.int64).reshape(-1, COLUMNS)
        return np.concatenate([*map(_unpack, self._packed[packed:]), newest])[count - packed * PACKED :]

    def pack(self) -> None:
        """Compress old rows."""
        while len(self._rows) >= 2 * PACKED * COLUMNS:
            old = self._rows[: PACKED * COLUMNS]
            self._packed.append(_pack(np.array(old, np.int64).reshape(-1, COLUMNS)))
            del self._rows[: PACKED * COLUMNS]


def _pack(rows: Int64) -> bytes:
    """Compressed: times as differences, and the bytes of a column sorted by significance."""
    columns = np.ascontiguousarray(rows.T)
    columns[END] -= columns[START]
    columns[START, 1:] -= rows[:-1, START]
    return zlib.compress(columns.view(np.uint8).reshape(COLUMNS, -1, 8).transpose(0, 2, 1).tobytes(), 1)


def _unpack(packed: bytes) -> Int64:
    by_weight = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(COLUMNS, 8, -1)
    columns = np.ascontiguousarray(by_weight.transpose(0, 2, 1)).view(np.int64)[:, :, 0]
    columns[START] = columns[START].cumsum()
    columns[END] += columns[START]
    return columns.T


# Turns of the loop that are read at once: requests (A), batches (G), backward passes (B, E), optimizer steps (S, D),
# also with closures, and gpulab's own time (O).
_LETTERS = bytes.maketrans(
    bytes((Kind.ASK, Kind.GOT, Kind.BACKWARD, Kind.BACKWARD_END, Kind.STEP, Kind.STEPPED, Kind.OWN)), b"AGBESDO"
)
_IGNORED = bytes((Kind.GRAD_OFF, Kind.GRAD_ON, Kind.EVAL, Kind.TRAIN))
_STEADY = re.compile(b"(AO*G|BO*E|S(O|BO*E)*D|O)+")


def repeated_rows(marks: Marks, turn: int, newest: list[int], mark_ns: int) -> Int64:
    """One row for each of the turns of `turn` marks that repeat the first, which made the row `newest`.

    `marks` begin with the mark that ended the previous turn. No rows if the turns cannot be read at once.
    """
    nothing: Int64 = np.empty((0, COLUMNS), np.int64)
    kind, argument = marks["kind"][1:], marks["argument"][1:]
    free = (kind[turn:] == Kind.GOT) | (kind[turn:] == Kind.OWN)
    alike = (kind[turn:] == kind[:-turn]) & ((argument[turn:] == argument[:-turn]) | free)
    turns = 1 + (len(alike) if alike.all() else int(alike.argmin())) // turn
    kinds = kind[:turn].astype(np.uint8).tobytes()
    letters = kinds.translate(_LETTERS)
    text = kinds.translate(_LETTERS, _IGNORED)
    if turns == 1 or not _STEADY.fullmatch(text[-1:] + text[:-1] if letters.endswith(b"A") else text):
        return nothing
    t_ns = np.lib.stride_tricks.sliding_window_view(marks["t_ns"], turn + 1)[: turns * turn : turn].T
    arguments = argument[: turns * turn].reshape(turns, turn).T
    table = np.zeros((turns, COLUMNS), np.int64)
    table[:, START], table[:, END], table[:, PHASE:] = t_ns[0], t_ns[-1], newest[PHASE:]
    table[:, OWN] = mark_ns * turn
    request_ns = began_ns = passed_ns = t_ns[0]
    is_waiting = letters.endswith(b"A")
    for letter, now_ns, value in zip(letters, t_ns[1:], arguments, strict=True):
        match chr(letter):
            case "A":
                request_ns, is_waiting = now_ns, True
            case "G":
                table[:, WAIT] += now_ns - request_ns
                table[:, BATCHES] += 1
                table[:, SAMPLES] += np.where(value < 0, UNKNOWN, value)
                is_waiting = False
            case "O":
                table[:, OWN] += value
                request_ns = request_ns + value * is_waiting
            case "S":
                began_ns = now_ns
            case "E":
                passed_ns = now_ns
            case "D":
                table[:, OPTIMIZER] += now_ns - np.maximum(began_ns, passed_ns)
    return table if table[0].tolist() == newest else nothing  # else a part of the turn belongs to no step


def live_columns(table: Int64) -> Int64:
    """Start, end, data wait (ns) and samples (-1: unknown) of these rows, [n, 4]."""
    return np.ascontiguousarray(_with_unknown(table)[:, (START, END, WAIT, SAMPLES)])


def steps_of_rows(table: Int64, origin_ns: int, *, ended: bool) -> Steps:
    """The rows as `Steps`, on a clock that starts at `origin_ns`; `ended`: no step follows the last one."""
    table = _with_unknown(table)
    for row in np.flatnonzero(table[:, FLAGS] & EXHAUSTED_FIRST).tolist():
        _give_back_batch(table, row)
    if len(table):
        table[0, FLAGS] |= StepFlag.FIRST
        table[-1, FLAGS] |= StepFlag.LAST if ended else 0
    start, end, wait, optimizer, batches, samples, own, phase, flags, _ = np.ascontiguousarray(table.T)
    wait = np.minimum(np.maximum(wait, 0), end - start)
    return Steps(
        number=np.arange(1, len(table) + 1, dtype=np.int64),
        start_ns=start - origin_ns,
        end_ns=end - origin_ns,
        data_wait_ns=wait,
        optimizer_ns=np.minimum(optimizer, end - start),
        batch_count=batches,
        sample_count=samples,
        phase=phase.astype(np.uint8),
        flags=flags.astype(np.uint8),
        own_ns=np.minimum(own, end - start - wait),
    )


def prefetch_count(table: Int64, loader: int) -> int:
    """How many of the newest rows are batches of `loader` that were fetched ahead in its epoch (Accelerate)."""
    rows = table[::-1]
    epochs = np.flatnonzero(rows[:, FLAGS] & EPOCH_START)
    others = np.flatnonzero(rows[:, FEEDER] != loader)
    return int(min([len(rows), *(epochs[:1] + 1), *others[:1]]))


def _with_unknown(table: Int64) -> Int64:
    """Set the samples of a step to -1 if those of one of its batches are unknown."""
    table[(table[:, SAMPLES] < 0) | (table[:, BATCHES] == 0), SAMPLES] = -1
    return table


def _give_back_batch(table: Int64, row: int) -> None:
    """Move a batch from an epoch's first step to its last: a loop that fetches ahead (Accelerate) takes two first."""
    epochs = np.flatnonzero(table[: row + 1, FLAGS] & EPOCH_START)
    first = int(epochs[-1]) if len(epochs) else row
    if first == row or table[first, BATCHES] < 2:
        return
    second = table[first + 1, BATCHES] if first + 1 < row else 0
    if table[row, BATCHES] and table[first, BATCHES] != second + 1:
        return
    each = table[first, SAMPLES] // table[first, BATCHES] if table[first, SAMPLES] >= 0 else 0
    certain = table[first, SAMPLES] >= 0 and (table[row, SAMPLES] >= 0 or not table[row, BATCHES])
    table[[first, row], BATCHES] += -1, 1
    table[first, SAMPLES] -= each
    table[row, SAMPLES] = max(table[row, SAMPLES], 0) + each if certain else -1
