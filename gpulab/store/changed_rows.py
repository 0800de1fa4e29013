"""Rows that change after they were written, for as long as steps are written at all: marks never change.

Beside a table that only grows another one says which of its rows are different by now.
"""

from __future__ import annotations

import struct

import numpy as np

from gpulab.run import Int64
from gpulab.store.table_file import Table

CHANGES = "changes"


def change(number: int, row: tuple[int, ...]) -> bytes:
    """That row is this one from now on."""
    return struct.pack(f"{1 + len(row)}q", number, *row)


def clear(count: int, width: int) -> bytes:
    """The first `count` rows that were written are none."""
    return change(-1, (count, *(0,) * (width - 1)))


def cleared(changes: Table) -> int:
    """How many rows that were written are none."""
    table = _numbers(changes)
    return int(table[table[:, 0] < 0][-1:, 1].sum())


def current(rows: Table, changes: Table) -> Int64:
    """All as they are by now, [n, columns]; a copy."""
    table, numbers = _numbers(rows)[cleared(changes) :].copy(), _numbers(changes)
    since = int(np.flatnonzero(numbers[:, 0] < 0)[-1:].sum()) if (numbers[:, 0] < 0).any() else -1
    for number, *row in numbers[since + 1 :].tolist():
        table[number] = row
    return table


def _numbers(rows: Table) -> Int64:
    return rows.view(np.int64).reshape(-1, len(rows.dtype.names or ()))
