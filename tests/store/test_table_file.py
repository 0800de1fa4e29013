"""A file of tables gives back what lists of rows would hold, however it is split and wherever it is cut."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulab.store.table_file import Table, Tables, Tail, Writer, read, write

TABLES = {
    "steps": np.dtype([("start_ns", np.int64), ("end_ns", np.int64)]),
    "losses": np.dtype(np.float64),
}
Plain = dict[str, list[float]]

BLOCKS = st.lists(st.tuples(st.sampled_from(sorted(TABLES)), st.integers(0, 5)), max_size=12)  # table, rows


class Written:
    """A file, and beside it the lists that it gives back."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self.path = folders.mktemp("tables") / "tables"
        self.writer = Writer(self.path, TABLES, {"process": 7})
        self.plain: Plain = {name: [] for name in TABLES}
        self.writer.begin()

    def append(self, number: int, table: str, count: int) -> None:
        values = [float(100 * number + i) for i in range(count)]
        self.plain[table] = self.plain[table] + values
        self.writer.append(table, _bytes(table, values))


@given(BLOCKS, st.data())
def test_a_file_cut_anywhere_has_all_whole_blocks(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[tuple[str, int]], data: st.DataObject
) -> None:
    written = Written(tmp_path_factory)
    path, writer = written.path, written.writer
    states, ends = [dict(written.plain)], [path.stat().st_size]
    for number, block in enumerate(blocks):
        written.append(number, *block)
        states.append(dict(written.plain))
        ends.append(path.stat().st_size)
    assert _plain(writer.read()) == written.plain and writer.read().whole
    assert _read(path).about == {"process": 7}
    cut = data.draw(st.integers(ends[0], ends[-1]))
    with open(path, "r+b") as file:
        file.truncate(cut)
    whole = sum(end <= cut for end in ends) - 1
    assert _plain(_read(path)) == states[whole] and _read(path).whole == (cut in ends)
    writer.close()


@given(BLOCKS, st.integers(1, 6), st.integers(1, 4))
def test_a_tail_has_the_last_rows(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[tuple[str, int]], kept_rows: int, every: int
) -> None:
    """Whoever looks while it is written, now and then, has the end of each table."""
    written = Written(tmp_path_factory)
    once = list[object]()
    tail = Tail(written.path, kept_rows, {"steps": lambda rows: once.extend(_values(rows))})
    for number, block in enumerate(blocks):
        written.append(number, *block)
        if number % every == 0:
            tail.read()
    tail.read()
    for name, values in written.plain.items():
        assert (once if name == "steps" else _values(tail.rows(name))) == values[0 if name == "steps" else -kept_rows :]
    written.writer.close()


@pytest.mark.parametrize("skip", [(), ("st",), ("",)])
def test_a_file_that_is_written_at_once_is_the_same(skip: tuple[str, ...]) -> None:
    tables: dict[str, Table] = {"steps": np.array([(1, 2), (3, 4)], TABLES["steps"]), "losses": np.arange(6.0)}
    file = io.BytesIO()
    write(file, tables | {"every other": np.arange(6)[::2], "none": np.empty(0)})
    found = read(file, skip)
    assert found.whole and found.tables["none"].dtype == np.float64
    for name, rows in tables.items():
        assert found.tables[name].tolist() == ([] if name.startswith(("none", *skip)) else rows.tolist())
    assert found.tables["every other"].tolist() == ([] if skip == ("",) else [0, 2, 4])


def _header(**more: object) -> bytes:
    return json.dumps({"gpulab_tables": 2, "tables": {}, "about": {}} | more).encode() + b"\n"


NO_TABLES: list[object] = [{"a": "O"}, {"a": [["b", "|V0"]]}, {"a": 7}, {"a": [["b", "O"]]}, []]


@pytest.mark.parametrize(
    "content",
    [b"", b"{}\n", _header(gpulab_tables=99), b"\x89PNG", _header()[:-1]] + [_header(tables=t) for t in NO_TABLES],
)
def test_another_file_has_no_tables(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="no table file"):
        _read(path)


def test_bytes_that_have_changed_end_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tables"
    writer = Writer(path, TABLES, {})
    for value in (1, 2):
        writer.append("losses", _bytes("losses", [value]))
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert _plain(_read(path))["losses"] == [1] and not _read(path).whole
    writer.close()


def test_a_full_disk_takes_no_half_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tables"
    writer = Writer(path, TABLES, {})
    writer.append("losses", _bytes("losses", [1, 2]))
    whole, write_all = path.stat().st_size, os.write
    written = [write_all, _full]

    def write_some(file: int, data: memoryview) -> int:
        return written.pop(0)(file, data[:5])

    monkeypatch.setattr(os, "write", write_some)
    with pytest.raises(OSError, match="No space"):
        writer.append("losses", _bytes("losses", [3]))
    monkeypatch.undo()
    assert path.stat().st_size == whole
    writer.append("losses", _bytes("losses", [4]))
    assert _plain(writer.read())["losses"] == [1, 2, 4]
    writer.close()


def _full(file: int, data: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read(path: Path) -> Tables:
    with path.open("rb") as file:
        return read(file)


def _bytes(table: str, values: list[float]) -> bytes:
    dtype = TABLES[table]
    return np.array([(value,) * len(dtype.names) if dtype.names else value for value in values], dtype).tobytes()


def _values(rows: np.ndarray) -> list[float]:
    return [row[0] if isinstance(row, tuple) else row for row in rows.tolist()]


def _plain(found: Tables) -> Plain:
    return {name: _values(rows) for name, rows in found.tables.items()}
