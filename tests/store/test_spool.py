"""A spool gives back what a list of rows would hold, however it is split and wherever it is cut."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulab.store.spool import Spool, Tail, read_spool

TABLES = {
    "steps": np.dtype([("start_ns", np.int64), ("end_ns", np.int64)]),
    "losses": np.dtype([("loss", np.float64)]),
}
Plain = dict[str, list[int]]

# A block: its table, from which row on as a share of those there are, and how many rows; 0 takes rows back.
BLOCKS = st.lists(st.tuples(st.sampled_from(sorted(TABLES)), st.floats(0, 1), st.integers(0, 5)), max_size=12)


class Written:
    """A spool, and beside it the lists that it gives back."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self.path = folders.mktemp("spool") / ".running"
        self.spool = Spool(self.path, TABLES, {"process": 7})
        self.plain: Plain = {name: [] for name in TABLES}
        self.spool.append("steps", 0, b"", 0)

    def append(self, number: int, table: str, share: float, count: int) -> None:
        """From that share of the rows on: as many new ones, else none."""
        rows = self.plain[table]
        first, values = int(share * len(rows)), [100 * number + i for i in range(count)]
        self.plain[table] = rows[:first] + values + (rows[first + count :] if count else [])
        self.spool.append(table, first, _bytes(table, values), len(self.plain[table]))


@given(BLOCKS, st.data())
def test_a_file_cut_anywhere_has_all_whole_blocks(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[tuple[str, float, int]], data: st.DataObject
) -> None:
    written = Written(tmp_path_factory)
    path, spool = written.path, written.spool
    states, ends = [dict(written.plain)], [path.stat().st_size]
    for number, block in enumerate(blocks):
        written.append(number, *block)
        states.append(dict(written.plain))
        ends.append(path.stat().st_size)
    assert _plain(spool.read().tables) == written.plain
    assert read_spool(path).about == {"process": 7}
    cut = data.draw(st.integers(ends[0], ends[-1]))
    with open(path, "r+b") as file:
        file.truncate(cut)
    whole = sum(end <= cut for end in ends) - 1
    assert _plain(read_spool(path).tables) == states[whole]
    spool.close()
    assert not path.exists()


@given(BLOCKS, st.integers(1, 6), st.integers(1, 4))
def test_a_tail_has_the_last_rows(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[tuple[str, float, int]], kept_rows: int, every: int
) -> None:
    """Whoever looks while it is written, now and then, has the end of each table, of rows that are only added."""
    written = Written(tmp_path_factory)
    tail = Tail(written.path, kept_rows)
    for number, (table, _, count) in enumerate(blocks):
        written.append(number, table, 1.0, count)
        if number % every == 0:
            tail.read()
    tail.read()
    for name, values in written.plain.items():
        assert tail.total(name) == len(values)
        assert _plain({name: tail.rows(name)})[name] == values[-kept_rows:]
    written.spool.close()


@given(BLOCKS)
def test_a_tail_that_keeps_all_has_what_a_reader_has(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[tuple[str, float, int]]
) -> None:
    written = Written(tmp_path_factory)
    tail = Tail(written.path, 10_000)
    for number, block in enumerate(blocks):
        written.append(number, *block)
        tail.read()
        assert _plain({name: tail.rows(name) for name in TABLES}) == written.plain
    written.spool.close()


@pytest.mark.parametrize("content", [b"", b"{}\n", b'{"gpulab_spool": 99, "tables": {}, "about": {}}\n', b"\x89PNG"])
def test_another_file_is_no_spool(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="no spool"):
        read_spool(path)


def test_bytes_that_have_changed_end_the_file(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    spool = Spool(path, TABLES, {})
    spool.append("losses", 0, _bytes("losses", [1]), 1)
    end = path.stat().st_size
    spool.append("losses", 1, _bytes("losses", [2]), 2)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert _plain(read_spool(path).tables)["losses"] == [1]
    assert path.stat().st_size > end
    spool.close()


def test_a_full_disk_takes_no_half_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "spool"
    spool = Spool(path, TABLES, {})
    spool.append("losses", 0, _bytes("losses", [1, 2]), 2)
    whole, write = path.stat().st_size, os.write
    written = [write, _full]

    def write_some(file: int, data: memoryview) -> int:
        return written.pop(0)(file, data[:5])

    monkeypatch.setattr(os, "write", write_some)
    with pytest.raises(OSError, match="No space"):
        spool.append("losses", 2, _bytes("losses", [3]), 3)
    monkeypatch.undo()
    assert path.stat().st_size == whole
    spool.append("losses", 2, _bytes("losses", [4]), 3)
    assert _plain(spool.read().tables)["losses"] == [1, 2, 4]
    spool.close()


def _full(file: int, data: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _bytes(table: str, values: list[int]) -> bytes:
    dtype = TABLES[table]
    return np.array([(value,) * len(dtype.names or ()) for value in values], dtype).tobytes()


def _plain(tables: dict[str, np.ndarray]) -> Plain:
    return {name: [int(row[0]) for row in table.tolist()] for name, table in tables.items()}
