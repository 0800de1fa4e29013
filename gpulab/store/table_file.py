"""A file of append-only tables: a run appends to it while other processes read it.

A file begins with one line of JSON that names its tables and their columns. Blocks follow, each with rows of one table.
A torn block at the end is ignored.

The writer holds a lock on the file, which the system releases however the writer ends, so a reader sees the end.
"""

from __future__ import annotations

import json
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gpulab.store.files import lock

FORMAT = 2
_MARK = b"ROWS"
_BLOCK = struct.Struct("<4sIqI")  # mark, number of the table, bytes, checksum
_LONGEST_HEADER = 1 << 20

Table = npt.NDArray[Any]  # numbers, or a structured array: one field per column


class Tables(Struct, frozen=True):
    """The content of a file: metadata of its writer, all rows of each table (read-only), and whether it is intact.

    `row_counts`: the number of rows of all tables, also of tables that were not read; None if not counted.
    """

    about: dict[str, Any]
    tables: dict[str, Table]
    whole: bool
    row_counts: dict[str, int] | None = None


class Writer:
    """Appends to a file. The first `append` creates it, so that a run of a second never touches the disk.

    Used by one thread at a time. `about`: metadata for readers.
    """

    def __init__(self, path: Path, tables: Mapping[str, np.dtype[Any]], about: Mapping[str, object]) -> None:
        self.path = path
        self._header = _header(tables, about)
        self._numbers = {name: i for i, name in enumerate(tables)}
        self._file = -1
        self._end = 0  # end of the last whole block

    def append(self, table: str, rows: bytes | memoryview) -> None:
        """Append rows; without rows, only create the file. Raises OSError and then leaves the file as before."""
        self.begin()
        if len(rows):
            rows = bytes(rows)  # the owner may change them meanwhile
            self._write(_head(self._numbers[table], rows) + rows)

    def read(self) -> Tables:
        """All appended rows. Raises OSError if there are none, or if the disk fails."""
        with os.fdopen(os.dup(self._file), "rb") as file:  # writes go to the end at any position
            return read(file)

    def close(self) -> None:
        """Close the file; also needed in a child process, which inherits the file and would keep its lock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def begin(self) -> None:
        """Create the file and its folder. Raises OSError."""
        if self._file >= 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_BINARY", 0)
        self._file = os.open(self.path, flags, 0o666)
        lock(self._file)
        _open.add(self)
        try:
            self._write(self._header)
        except OSError:
            self.close()
            self.path.unlink(missing_ok=True)
            raise

    def _write(self, data: bytes) -> None:
        """Write without a buffer; a partial write is undone."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += len(data)


_open: weakref.WeakSet[Writer] = weakref.WeakSet()


def _close_all() -> None:
    for writer in list(_open):
        writer.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


def write(file: IO[bytes], tables: Mapping[str, Table]) -> None:
    """Write a whole file at once: one block for each table."""
    file.write(_header({name: rows.dtype for name, rows in tables.items()}, {}))
    for number, rows in enumerate(tables.values()):
        packed = np.ascontiguousarray(rows).view(np.uint8).data
        file.write(_head(number, packed))
        file.write(packed)


def read(file: IO[bytes], skip: tuple[str, ...] = ()) -> Tables:
    """All whole blocks, except of tables that begin with `skip`. Raises OSError, and ValueError for another format."""
    about, dtypes, end = _read_header(file)
    size, blocks, row_counts = file.seek(0, os.SEEK_END), list[_Block](), dict.fromkeys(dtypes, 0)
    for block in _blocks(file, dtypes, end, size):
        end = block.end
        row_counts[block.table] += block.rows
        if not block.table.startswith(skip):
            blocks.append(block)
    tables = {name: np.empty(sum(b.rows for b in blocks if b.table == name), t) for name, t in dtypes.items()}
    counts = dict.fromkeys(tables, 0)
    for block in blocks:
        first, last = counts[block.table], counts[block.table] + block.rows
        if not block.read_into(file, tables[block.table][first:last]):
            end = -1
            break
        counts[block.table] = last
    for name, rows in tables.items():
        tables[name] = rows[: counts[name]]
        tables[name].flags.writeable = False
    return Tables(about, tables, end == size, row_counts)


class Tail:
    """Follows a file that another process writes: each `read` reads the new blocks and keeps the last rows.

    `readers` get all rows of their tables, once.
    """

    def __init__(self, path: Path, most_rows: int, readers: Mapping[str, Callable[[Table], object]]) -> None:
        self._path, self._most_rows, self._readers = path, most_rows, readers
        self._offset = 0
        self._tables: dict[str, Table] = {}

    def read(self) -> None:
        """Read the new whole blocks. Raises OSError, and ValueError if the file is a different one."""
        with open(self._path, "rb") as file:
            if not self._tables:
                _, dtypes, self._offset = _read_header(file)
                self._tables = {name: np.empty(0, dtype) for name, dtype in dtypes.items()}
            dtypes = {name: rows.dtype for name, rows in self._tables.items()}
            for block in _blocks(file, dtypes, self._offset, file.seek(0, os.SEEK_END)):
                rows = np.empty(block.rows, dtypes[block.table])
                if not block.read_into(file, rows):
                    return
                if block.table in self._readers:
                    self._readers[block.table](rows)
                else:
                    self._tables[block.table] = np.concatenate((self._tables[block.table], rows))[-self._most_rows :]
                self._offset = block.end

    def rows(self, table: str) -> Table:
        """The last rows. Raises KeyError for a table that the file does not name."""
        return self._tables[table]


class _Block(Struct, frozen=True):
    table: str
    rows: int
    begin: int
    end: int
    checksum: int

    def read_into(self, file: IO[bytes], rows: Table) -> bool:
        """Read the rows; returns whether their checksum is right."""
        file.seek(self.begin)
        packed = rows.view(np.uint8).data
        return file.readinto(packed) == len(packed) and zlib.crc32(packed) == self.checksum  # type: ignore[attr-defined]


def _blocks(file: IO[bytes], dtypes: Mapping[str, np.dtype[Any]], offset: int, size: int) -> Iterator[_Block]:
    """The complete blocks from `offset` on; their rows are not read."""
    names = list(dtypes)
    while offset + _BLOCK.size <= size:
        file.seek(offset)
        mark, number, length, checksum = _BLOCK.unpack(file.read(_BLOCK.size))
        begin = offset + _BLOCK.size
        offset = begin + length
        if mark != _MARK or number >= len(names) or not begin <= offset <= size:
            return
        rows, rest = divmod(length, dtypes[names[number]].itemsize)
        if rest:
            return
        yield _Block(names[number], rows, begin, offset, checksum)


def _head(number: int, rows: bytes | memoryview) -> bytes:
    return _BLOCK.pack(_MARK, number, len(rows), zlib.crc32(rows))


def _header(tables: Mapping[str, np.dtype[Any]], about: Mapping[str, object]) -> bytes:
    """The header line; numbers are in the byte order of the writing machine."""
    columns = {name: dtype.descr if dtype.names else dtype.str for name, dtype in tables.items()}
    return json.dumps({"gpulab_tables": FORMAT, "tables": columns, "about": about}).encode() + b"\n"


def _read_header(file: IO[bytes]) -> tuple[dict[str, Any], dict[str, np.dtype[Any]], int]:
    file.seek(0)
    line = file.readline(_LONGEST_HEADER)
    try:
        header = json.loads(line)
        if line[-1:] != b"\n" or header["gpulab_tables"] != FORMAT:
            raise ValueError("another format")
        return header["about"], {name: _dtype(columns) for name, columns in header["tables"].items()}, len(line)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"no table file of gpulab's: {e}") from e


def _dtype(columns: str | list[list[str]]) -> np.dtype[Any]:
    dtype = np.dtype(columns if isinstance(columns, str) else [(name, kind) for name, kind in columns])
    if dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"{dtype} is no number")
    return dtype
