"""Closed steps stay rows, wherever an interrupt comes and however many there are."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from gpulab.capture.steps import rows as rows_module
from gpulab.capture.steps.rows import BATCHES, FLAGS, SAMPLES, OpenStep, Rows
from gpulab.run import Int64, StepFlag, Steps
from gpulab.store.changed_rows import CHANGES, current
from gpulab.store.run_tables import STEP_COLUMNS, STEPS, TABLES
from gpulab.store.table_file import Writer

READ = ("data_wait_ns", "optimizer_ns", "own_ns", "batches", "samples", "flags")


class Interrupted(OpenStep):
    """Raises where that attribute is read, as Ctrl-C may."""

    at: str = ""

    def __getattribute__(self, name: str) -> object:
        if name == object.__getattribute__(self, "at"):
            raise KeyboardInterrupt
        return super().__getattribute__(name)


@pytest.mark.parametrize("at", ["start_ns", *READ])
@pytest.mark.parametrize("goes_on", [True, False])
def test_an_interrupt_amid_a_row_leaves_whole_rows(at: str, goes_on: bool) -> None:
    rows = Rows()
    rows.append(OpenStep(0, data_wait_ns=1, batches=1, samples=4), 10, 2)
    broken = Interrupted(10, data_wait_ns=7, batches=1, samples=7)
    broken.at = at
    with pytest.raises(KeyboardInterrupt):
        rows.append(broken, 20, 2)
    assert len(rows) == 1
    if goes_on:
        rows.append(OpenStep(20, data_wait_ns=3, batches=1, samples=4), 30, 2)
    steps = rows.steps(0)
    columns = {field.name for field in fields(Steps)} - {"device_ns", "input_rows"}
    assert {len(getattr(steps, name)) for name in columns} == {1 + goes_on}
    assert steps.data_wait_ns.tolist() == [1, 3][: 1 + goes_on] and steps.sample_count.tolist() == [4, 4][: 1 + goes_on]


# -- against lists of numbers, with blocks of three rows ---------------------------------------------------------------

counts = st.integers(0, 6)
ACTIONS = st.one_of(
    st.tuples(st.just("append"), counts, st.integers(-1, 8)),
    st.tuples(st.just("flag"), st.integers(0, 30), st.sampled_from([int(f) for f in StepFlag])),
    st.tuples(st.just("give"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("clear"), st.just(0), st.just(0)),
    st.tuples(st.just("write"), st.just(0), st.just(0)),
)


@given(st.lists(ACTIONS, max_size=60), st.integers(0, 60))
def test_rows_are_as_lists_would_have_them(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int, int]], newest: int
) -> None:
    writer = Writer(tmp_path_factory.mktemp("journal") / "tables", TABLES, {})
    with closing(writer), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "ROWS_IN_BLOCK", 3)
        rows, plain = _played(actions, writer)
        if actions and actions[-1][0] == "write":
            assert _written(writer).tolist() == plain, "as another process would read it"
        assert [rows.row(i) for i in range(len(rows))] == [tuple(row) for row in plain]
        epochs = [i for i, row in enumerate(plain) if row[FLAGS] & StepFlag.EPOCH_START]
        assert rows.since_epoch() == len(plain) - (epochs[-1] if epochs else 0)
        count = min(newest, len(plain))
        step, rest = OpenStep(99), plain[len(plain) - count :]
        rows.lead_into(step, count)
        assert step.batches == sum(row[BATCHES] for row in rest)
        assert step.samples == sum(max(0, row[SAMPLES]) for row in rest)
        assert step.samples_known == all(row[SAMPLES] >= 0 for row in rest)
        assert step.start_ns == (rest[0][0] if rest else 99)
        assert rows.steps(0).batch_count.tolist() == [row[BATCHES] for row in plain]


def _written(writer: Writer) -> Int64:
    tables = writer.read().tables
    return current(tables[STEPS], tables[CHANGES])


def _played(actions: list[tuple[str, int, int]], writer: Writer) -> tuple[Rows, list[list[int]]]:
    rows, plain = Rows(), list[list[int]]()
    for what, number, value in actions:
        if what == "append":
            start = 10 * len(plain)
            step = OpenStep(start, batches=number, samples=max(0, value), samples_known=value >= 0)
            rows.append(step, start + 10, 1)
            known = value if value >= 0 and number else -1
            plain.append([start, start + 10, 0, 0, 0, number, known, 1, 0])
        elif what == "write":
            writer.begin()
            rows.write(writer)
        elif what == "clear":
            rows.clear()
            plain.clear()
        elif number < len(plain) and what == "flag":
            rows.add_flags(number, value)
            plain[number][FLAGS] |= value
        elif number < len(plain) and plain[number][BATCHES]:
            rows.give_batch(number, OpenStep(0))
            each = plain[number][SAMPLES] // plain[number][BATCHES]
            plain[number][BATCHES] -= 1
            plain[number][SAMPLES] -= each if plain[number][SAMPLES] >= 0 else 0
    assert all(len(row) == len(STEP_COLUMNS) for row in plain)
    return rows, plain


def test_rows_that_a_thread_writes_are_all_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "ROWS_IN_BLOCK", 16)
    rows, over = Rows(), threading.Event()
    writer = Writer(tmp_path / "tables", TABLES, {})

    def write() -> None:
        while not over.is_set():
            rows.write(writer)

    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(write)
        for i in range(5_000):
            rows.append(OpenStep(10 * i, batches=2, samples=8), 10 * i + 10, 1)
            rows.add_flags(-1, int(StepFlag.COMPILE) if i % 3 == 0 else 0)
            if i % 100 == 99:
                rows.give_batch(i - 7, OpenStep(0))
        over.set()
    assert thread.exception() is None
    rows.write(writer)
    steps, written = rows.steps(0), _written(writer)
    writer.close()
    assert steps.start_ns.tolist() == [10 * i for i in range(5_000)] == written[:, 0].tolist()
    batches = [1 if i % 100 == 92 else 2 for i in range(5_000)]
    assert steps.batch_count.tolist() == batches == written[:, BATCHES].tolist()
    compiled = [bool(flags & StepFlag.COMPILE) for flags in steps.flags.tolist()]
    assert compiled == [i % 3 == 0 for i in range(5_000)] == (written[:, FLAGS] & int(StepFlag.COMPILE) > 0).tolist()
    assert len([block for block in rows._blocks if block is not None]) <= rows_module.KEPT_BLOCKS
