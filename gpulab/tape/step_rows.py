"""The steps that have ended, as rows of numbers: old ones take a tenth as many bytes, so that a million take little.

A row's `SAMPLES` are a sum, to which a batch of unknown size adds `UNKNOWN`.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Sequence

import numpy as np

from gpulab.run import Int64, StepFlag, Steps
from gpulab.tape.marks import Kind, Marks

COLUMNS = 10
START, END, WAIT, OPTIMIZER, BATCHES, SAMPLES, OWN, PHASE, FLAGS, FEEDER = range(COLUMNS)
ENDED_FIRST = 1 << 8  # a flag: the step's loader had none left when the optimizer stepped
UNKNOWN = -(1 << 40)
PACKED = 4_096  # rows that are packed; the newest so many are not


class StepRows:
    """The rows in order; the newest of them can be taken back."""

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
        """Its columns. Raises IndexError without a row."""
        if not self._rows:
            raise IndexError("no step has ended")
        return self._rows[-COLUMNS:].tolist()

    def pop(self) -> list[int]:
        """The newest row, which is gone then."""
        row = self.newest
        del self._rows[-COLUMNS:]
        return row

    def clear(self) -> None:
        self._packed.clear()
        del self._rows[:]

    def table(self, count: int = 0) -> Int64:
        """The rows after so many, [n, columns]; a copy."""
        packed = min(count // PACKED, len(self._packed))
        newest = np.array(self._rows, np.int64).reshape(-1, COLUMNS)
        return np.concatenate([*map(_unpack, self._packed[packed:]), newest])[count - packed * PACKED :]

    def pack(self) -> None:
        """Pack what is old."""
        while len(self._rows) >= 2 * PACKED * COLUMNS:
            old = self._rows[: PACKED * COLUMNS]
            self._packed.append(_pack(np.array(old, np.int64).reshape(-1, COLUMNS)))
            del self._rows[: PACKED * COLUMNS]


def _pack(rows: Int64) -> bytes:
    """Times as differences, and the bytes of a column by their weight."""
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


# a turn of the loop whose repetitions are read at once: requests, batches, backward passes, optimizers' steps, closures
_LETTERS = bytes.maketrans(
    bytes((Kind.ASK, Kind.GOT, Kind.BACKWARD, Kind.BACKWARD_END, Kind.STEP, Kind.STEPPED, Kind.OWN)), b"AGBESDO"
)
_UNHEARD = bytes((Kind.GRAD_OFF, Kind.GRAD_ON, Kind.EVAL, Kind.TRAIN))
_STEADY = re.compile(b"(AO*G|BO*E|S(O|BO*E)*D|O)+")


def repeated_rows(marks: Marks, turn: int, newest: list[int], mark_ns: int) -> Int64:
    """Of turns of so many marks that are all alike, a row for each; the first turn made the `newest` row.

    `marks` begin with the mark that ended the turn before. Without a row where they cannot be read so.
    """
    nothing: Int64 = np.empty((0, COLUMNS), np.int64)
    kind, argument = marks["kind"][1:], marks["argument"][1:]
    free = (kind[turn:] == Kind.GOT) | (kind[turn:] == Kind.OWN)
    alike = (kind[turn:] == kind[:-turn]) & ((argument[turn:] == argument[:-turn]) | free)
    turns = 1 + (len(alike) if alike.all() else int(alike.argmin())) // turn
    kinds = kind[:turn].astype(np.uint8).tobytes()
    letters = kinds.translate(_LETTERS)
    heard = kinds.translate(_LETTERS, _UNHEARD)
    if turns == 1 or not _STEADY.fullmatch(heard[-1:] + heard[:-1] if letters.endswith(b"A") else heard):
        return nothing
    t_ns = np.lib.stride_tricks.sliding_window_view(marks["t_ns"], turn + 1)[: turns * turn : turn].T
    arguments = argument[: turns * turn].reshape(turns, turn).T
    table = np.zeros((turns, COLUMNS), np.int64)
    table[:, START], table[:, END], table[:, PHASE:] = t_ns[0], t_ns[-1], newest[PHASE:]
    table[:, OWN] = mark_ns * turn
    asked_ns = began_ns = passed_ns = t_ns[0]
    asks = letters.endswith(b"A")
    for letter, now_ns, value in zip(letters, t_ns[1:], arguments, strict=True):
        match chr(letter):
            case "A":
                asked_ns, asks = now_ns, True
            case "G":
                table[:, WAIT] += now_ns - asked_ns
                table[:, BATCHES] += 1
                table[:, SAMPLES] += np.where(value < 0, UNKNOWN, value)
                asks = False
            case "O":
                table[:, OWN] += value
                asked_ns = asked_ns + value * asks
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
    """As the record has them, on a clock that starts at `origin_ns`; `ended`: none follows the last one."""
    table = _with_unknown(table)
    for row in np.flatnonzero(table[:, FLAGS] & ENDED_FIRST).tolist():
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


def _with_unknown(table: Int64) -> Int64:
    """Where the samples of a batch are not known, those of its step are not."""
    table[(table[:, SAMPLES] < 0) | (table[:, BATCHES] == 0), SAMPLES] = -1
    return table


def _give_back_batch(table: Int64, row: int) -> None:
    """A loop that fetches one batch ahead (Accelerate) has fetched the last step's batch in the epoch's first."""
    begun = np.flatnonzero(table[: row + 1, FLAGS] & int(StepFlag.EPOCH_START))
    first = int(begun[-1]) if len(begun) else row
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
