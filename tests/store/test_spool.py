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


@given(BLOCKS, st.data())
def test_a_file_cut_anywhere_has_all_whole_blocks(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[tuple[str, float, int]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("spool") / ".running"
    spool, plain = Spool(path, TABLES, {"process": 7}), {name: list[int]() for name in TABLES}
    states, ends = [_copy(plain)], [0]
    spool.append("steps", 0, b"", 0)
    ends[0] = path.stat().st_size
    for number, (table, share, count) in enumerate(blocks):
        first = int(share * len(plain[table]))
        values = [100 * number + i for i in range(count)]
        kept = plain[table][:first] + values + (plain[table][first + count :] if count else [])
        spool.append(table, first, _bytes(table, values), len(kept))
        plain[table] = kept
        states.append(_copy(plain))
        ends.append(path.stat().st_size)
    assert _plain(spool.read().tables) == plain
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
    path = tmp_path_factory.mktemp("spool") / ".running"
    spool, plain = Spool(path, TABLES, {}), {name: list[int]() for name in TABLES}
    spool.append("steps", 0, b"", 0)
    tail = Tail(path, kept_rows)
    for number, (table, _, count) in enumerate(blocks):
        values = [100 * number + i for i in range(count)]
        spool.append(table, len(plain[table]), _bytes(table, values), len(plain[table]) + count)
        plain[table] += values
        if number % every == 0:
            tail.read()
    tail.read()
    for name, values in plain.items():
        assert tail.total(name) == len(values)
        assert _plain({name: tail.rows(name)})[name] == values[-kept_rows:]
    spool.close()


@given(BLOCKS)
def test_a_tail_that_keeps_all_has_what_a_reader_has(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[tuple[str, float, int]]
) -> None:
    path = tmp_path_factory.mktemp("spool") / ".running"
    spool, plain = Spool(path, TABLES, {}), {name: list[int]() for name in TABLES}
    spool.append("steps", 0, b"", 0)
    tail = Tail(path, 10_000)
    for number, (table, share, count) in enumerate(blocks):
        first = int(share * len(plain[table]))
        values = [100 * number + i for i in range(count)]
        plain[table] = plain[table][:first] + values + (plain[table][first + count :] if count else [])
        spool.append(table, first, _bytes(table, values), len(plain[table]))
        tail.read()
        assert {name: _plain({name: tail.rows(name)})[name] for name in TABLES} == plain
    spool.close()


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


def _copy(plain: Plain) -> Plain:
    return {name: list(rows) for name, rows in plain.items()}
