"""What a run has measured so far, on disk while it goes on: its memory stays flat, and a killed process loses a second.

A file begins with one line of JSON that names its tables and their columns; whole blocks follow and are only ever
appended. A block holds rows of one table from a given row on, and says how many rows the table has from then on: so
rows are added, changed and taken back. What follows the last whole block was cut off and does not count.

Its writer holds a lock on the file, which the system takes back however the writer ends: by that a reader knows.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

FORMAT = 1
_MARK = b"ROWS"
_BLOCK = struct.Struct("<4sIqqqI")  # mark, number of the table, first row, bytes, rows of the table, checksum
_LONGEST_HEADER = 1 << 16

Table = npt.NDArray[Any]  # structured: one field for each column
Read = Callable[[int, int], bytes]  # so many bytes from an offset on; fewer at the end of the file


class Spooled(Struct, frozen=True):
    """A whole file: what its writer says of itself, and all rows of each table."""

    about: dict[str, Any]
    tables: dict[str, Table]


class Spool:
    """A file that grows. Made by the first `append`, so that a run of a second leaves no trace on the disk.

    One thread at a time. `about`: plain data for a later reader.
    """

    def __init__(self, path: Path, tables: Mapping[str, np.dtype[Any]], about: Mapping[str, object]) -> None:
        self.path = path
        self._tables = dict(tables)
        self._about = dict(about)
        self._numbers = {name: i for i, name in enumerate(self._tables)}
        self._file = -1
        self._end = 0  # of the last whole block

    def append(self, table: str, first: int, rows: bytes | bytearray | memoryview, total: int) -> None:
        """Rows from `first` on; from then on the table has `total`. Raises OSError; then the file is as before."""
        if self._file < 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_BINARY", 0)
            self._file = os.open(self.path, flags, 0o666)
            lock(self._file)
            _open.add(self)
            columns = {name: _as_plain(dtype) for name, dtype in self._tables.items()}
            header = {"gpulab_spool": FORMAT, "tables": columns, "about": self._about}
            try:
                self._write(json.dumps(header).encode() + b"\n")
            except OSError:
                self.close()
                raise
        head = _BLOCK.pack(_MARK, self._numbers[table], first, len(rows), total, zlib.crc32(rows))
        self._write(head + rows)

    def read(self) -> Spooled:
        """All that was appended. Raises OSError where nothing was, or the disk fails."""
        return _read(self._read_at)

    def close(self) -> None:
        """Remove the file. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self.path.unlink(missing_ok=True)

    def forget(self) -> None:
        """In a child of the writer, which inherits the file and would keep its lock: it is not this process's."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, data: bytes) -> None:
        """At once and unbuffered; what was written of it by halves is taken back."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += len(data)

    def _read_at(self, offset: int, size: int) -> bytes:
        os.lseek(self._file, offset, os.SEEK_SET)  # writes go to the end whatever the position is
        return os.read(self._file, size)


_open: weakref.WeakSet[Spool] = weakref.WeakSet()


def _forget_all() -> None:
    for spool in list(_open):
        spool.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def lock(file: int) -> bool | None:
    """Whether nobody else has the file locked; it is locked then. None where this file system knows no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def left_behind(path: Path, stale_s: float) -> Iterator[bool]:
    """Whether the writer of a spool has ended and nobody else takes care of it; inside, nobody else does.

    Where files cannot be locked: whether it was not written to for `stale_s`.
    """
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:  # gone meanwhile, or not ours
        yield False
        return
    try:
        locked, status = lock(file), os.fstat(file)
        if locked is None:
            locked = time.time() - status.st_mtime > stale_s
        yield locked and status.st_nlink > 0
    finally:
        os.close(file)


def read_spool(path: Path) -> Spooled:
    """All whole blocks of a file, whoever wrote it. Raises OSError, and ValueError where it is no such file."""
    with open(path, "rb", buffering=0) as file:

        def read_at(offset: int, size: int) -> bytes:
            file.seek(offset)
            return file.read(size) or b""

        return _read(read_at)


class _Block(Struct, frozen=True):
    table: str
    first: int
    rows: Table
    total: int


def _read(read: Read) -> Spooled:
    """Twice over the file: how many rows there are in the end, and the rows."""
    about, dtypes, start = _header(read)
    totals = dict.fromkeys(dtypes, 0)
    for block in _blocks(read, dtypes, start):
        totals[block.table] = block.total
    tables: dict[str, Table] = {name: np.zeros(totals[name], dtype) for name, dtype in dtypes.items()}
    for block in _blocks(read, dtypes, start):
        within = tables[block.table][block.first : block.first + len(block.rows)]
        within[:] = block.rows[: len(within)]
    return Spooled(about, tables)


class Tail:
    """The end of a spool that somebody else writes: each `read` takes in what is new; the last rows are kept.

    All rows of the tables of `readers` are handed to these, once.
    """

    def __init__(
        self, path: Path, kept_rows: int, readers: Mapping[str, Callable[[Table], object]] | None = None
    ) -> None:
        self._path, self._kept_rows = path, kept_rows
        self._readers = readers or {}
        self._offset = 0
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._tables: dict[str, tuple[int, Table]] = {}  # the number of the first kept row, and the rows

    def read(self) -> None:
        """Take in whole blocks that are new. Raises OSError, and ValueError where it is no spool."""
        with open(self._path, "rb", buffering=0) as file:

            def read_at(offset: int, size: int) -> bytes:
                file.seek(offset)
                return file.read(size) or b""

            if not self._dtypes:
                _, self._dtypes, self._offset = _header(read_at)
            for block in _blocks(read_at, self._dtypes, self._offset):
                if block.table in self._readers:
                    self._readers[block.table](block.rows)
                else:
                    self._take(block)
                self._offset += _BLOCK.size + block.rows.nbytes

    def rows(self, table: str) -> Table:
        """The last rows; of a table of single bytes, which is a text, all."""
        dtype = self._dtypes.get(table)
        return self._tables.get(table, (0, np.empty(0, dtype)))[1]

    def total(self, table: str) -> int:
        """How many rows it has by now."""
        first, rows = self._tables.get(table, (0, ()))
        return first + len(rows)

    def _take(self, block: _Block) -> None:
        first, rows = self._tables.get(block.table, (0, np.empty(0, block.rows.dtype)))
        if block.first < first or block.first > first + len(rows):  # what it changes is not kept here
            first, rows = block.first, rows[:0]
        place = block.first - first
        rows = np.concatenate((rows[:place], block.rows, rows[place + len(block.rows) :]))[
            : max(0, block.total - first)
        ]
        spare = len(rows) - self._kept_rows if block.rows.dtype.itemsize > 1 else 0
        if spare > 0:
            first, rows = first + spare, rows[spare:]
        self._tables[block.table] = (first, rows)


def _header(read: Read) -> tuple[dict[str, Any], dict[str, np.dtype[Any]], int]:
    line, newline, _ = read(0, _LONGEST_HEADER).partition(b"\n")
    try:
        header = json.loads(line)
        if not newline or header["gpulab_spool"] != FORMAT:
            raise ValueError("another format")
        dtypes = {name: np.dtype([(c, t) for c, t in columns]) for name, columns in header["tables"].items()}
        return header["about"], dtypes, len(line) + 1
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"no spool of gpulab's: {e}") from e


def _blocks(read: Read, dtypes: dict[str, np.dtype[Any]], offset: int) -> Iterator[_Block]:
    names = list(dtypes)
    while len(head := read(offset, _BLOCK.size)) == _BLOCK.size:
        mark, number, first, size, total, checksum = _BLOCK.unpack(head)
        if mark != _MARK or number >= len(names) or min(first, size, total) < 0:
            return
        rows = read(offset + _BLOCK.size, size)
        dtype = dtypes[names[number]]
        if len(rows) != size or size % dtype.itemsize or zlib.crc32(rows) != checksum:
            return
        yield _Block(names[number], first, np.frombuffer(rows, dtype), total)
        offset += _BLOCK.size + size


def _as_plain(dtype: np.dtype[Any]) -> list[tuple[str, str]]:
    """The columns, in the byte order of the machine that writes."""
    return [(name, dtype[name].str) for name in dtype.names or ()]
