"""The run store: what is saved comes back bit by bit, and nothing else is ever believed."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import textwrap
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.api.runs import MOST_IN_MEMORY, Runs
from gpulab.errors import StoreError
from gpulab.run import SCHEMA, Device, Outcome, Run
from gpulab.store import run_format, table_file
from gpulab.store.folders import COLUMNS, DOCUMENT, NPZ, Store, new_id, read, trace_path
from tests.support.fork_server import python_with_torch
from tests.support.paths import ROOT
from tests.support.strategies import assert_same, runs, tiny_run

OLD = "20250101-000000-aaaaaa"
MIDDLE = "20250101-120000-abcdef"
NEW = "20250102-000000-bbbbbb"
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


def make(id: str, name: str = "", outcome: Outcome = "completed") -> Run:
    created = f"2025-01-{id[6:8]}T00:00:00+00:00"
    return replace(tiny_run(id, name=name), created=created, outcome=outcome)


def hidden(store: Store) -> list[Path]:
    return [f for f in store.root.iterdir() if f.name.startswith(".")]


# the round trip


@settings(max_examples=100, deadline=None)
@given(runs())
def test_a_run_comes_back_bit_by_bit(run: Run) -> None:
    document, columns = run_format.encode(run)
    assert_same(run, run_format.decode(document, io.BytesIO(columns)))


@settings(max_examples=30, deadline=None)
@given(runs())
def test_an_outline_is_the_run_without_its_timeline(run: Run) -> None:
    document, columns = run_format.encode(run)
    outline = run_format.decode(document, io.BytesIO(columns), timeline=False)
    assert_same(replace(run, timeline=None), outline)


def test_one_array_may_serve_steps_and_timeline(store: Store) -> None:
    run = tiny_run(count=2)
    assert run.timeline is not None
    shared = run.steps.start_ns
    run = replace(run, timeline=replace(run.timeline, start_ns=shared))
    folder = store.save(run)
    assert_same(run, read(folder))
    assert_same(replace(run, timeline=None), read(folder, timeline=False))


def test_what_json_cannot_hold_does_not_lose_the_run(store: Store) -> None:
    device = Device("cpu", "a CPU", details={"power_limit_w": float("nan")})
    run = store.load(store.save(replace(tiny_run(), outcome_detail="bad \udc80 byte", device=device)))
    assert run.outcome_detail == r"bad \udc80 byte" and run.device.details == {"power_limit_w": None}


def test_a_run_that_contradicts_itself_is_not_stored(store: Store) -> None:
    run = tiny_run()
    floats = replace(run, steps=replace(run.steps, number=run.steps.number.astype(np.float64)))
    with pytest.raises(StoreError, match=r"'steps.number' holds float64 instead of int64"):
        store.save(floats)
    with pytest.raises(StoreError, match="a traced step is not among the steps"):
        store.save(replace(run, traced_numbers=(99,)))
    assert store.list() == [] and hidden(store) == []


# finding a run


def test_a_run_is_found_by_id_position_name_prefix_and_path(store: Store) -> None:
    old, new = store.save(make(OLD, "cnn")), store.save(make(NEW, "cnn"))
    assert [e.id for e in store.list()] == [OLD, NEW]
    for key in (OLD, "-2", "20250101", str(old), old, old / DOCUMENT):
        assert store.find(key) == old, key
    for key in (NEW, "-1", "latest", "cnn", "20250102-"):
        assert store.find(key) == new, key
    slashed = store.save(make("20250103-000000-cccccc", "cnn/batch 64"))
    assert store.find("cnn/batch 64") == slashed


def test_an_unknown_run_names_the_nearest(store: Store) -> None:
    with pytest.raises(StoreError, match=r"There is no run in .* yet"):
        store.load("latest")
    store.save(make(OLD, "resnet"))
    store.save(make(NEW, "gpt"))
    with pytest.raises(StoreError, match=r"no run 'resnt' in .*\. Did you mean 'resnet'"):
        store.load("resnt")
    with pytest.raises(StoreError, match="matches 2 runs"):
        store.load("2025")
    with pytest.raises(StoreError, match=r"no run -3: .* holds 2"):
        store.load("-3")
    with pytest.raises(StoreError, match="is not the folder of a run"):
        store.load(Path("../../etc"))
    for key in ("../../etc", "n" * 5000, "\0"):
        with pytest.raises(StoreError, match=r"There is no run .*\. `gpulab runs` lists them"):
            store.load(key)
    with pytest.raises(StoreError, match="There is no run ''"):
        store.load("")


def test_the_store_lies_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPULAB_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    assert Store().root == tmp_path / ".gpulab" / "runs"
    monkeypatch.setenv("GPULAB_DIR", str(tmp_path / "elsewhere"))
    assert Store().root == tmp_path / "elsewhere" / "runs"


def test_ids_are_unique_and_leave_the_random_state_alone() -> None:
    import random

    before = random.getstate()
    assert len({new_id() for _ in range(100)}) == 100
    assert random.getstate() == before


# saving


def files_of(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


@pytest.mark.parametrize("later", [False, True])
def test_the_trace_has_the_name_that_tensorboard_looks_for(store: Store, later: bool) -> None:
    seen: list[str] = []

    def write(path: Path) -> None:
        path.write_bytes(b"half")
        seen.extend(f.name for f in store.root.rglob("*.pt.trace.json*"))

    run = make("a")
    folder = store.save(run, None if later else write)
    assert not later or store.add_trace(folder, run, write) is run
    assert seen == [], "it has the name when it is whole"
    trace = trace_path(folder)
    assert trace is not None and re.fullmatch(rf"host_{os.getpid()}\.\d+\.pt\.trace\.json\.gz", trace.name)
    assert files_of(folder) == {DOCUMENT, COLUMNS, trace.name} and not store.load("a").missing


@pytest.mark.parametrize("later", [False, True])
def test_a_trace_that_cannot_be_written_does_not_lose_the_run(store: Store, later: bool) -> None:
    def write(path: Path) -> None:
        path.write_bytes(b"half a trace")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = make("a")
    folder = store.save(run, None if later else write)
    if later:
        assert store.add_trace(folder, run, write).missing == store.load("a").missing
    (missing,) = store.load("a").missing
    assert missing.what == "trace file" and "no space left on device" in missing.reason
    assert files_of(folder) == {DOCUMENT, COLUMNS}


def test_an_interrupt_while_a_later_trace_is_written(store: Store) -> None:
    def write(path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    run = make("a")
    with pytest.raises(KeyboardInterrupt):
        store.save(run, write)
    assert list(store.root.iterdir()) == [], "a run that was being saved"
    folder = store.save(run)
    with pytest.raises(KeyboardInterrupt):
        store.add_trace(folder, run, write)
    assert files_of(folder) == {DOCUMENT, COLUMNS} and not store.load("a").missing


def test_a_full_disk_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(make(OLD))

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"Run not saved in .*: no space left on device"):
        store.save(make(NEW))
    assert [e.id for e in store.list()] == [OLD] and hidden(store) == []


def test_a_store_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match=r"Run not saved in .*: not a directory"):
        Store(tmp_path / "file" / "runs").save(tiny_run())
    with pytest.raises(StoreError, match="cannot be read: not a directory"):
        Store(tmp_path / "file").list()


def test_an_id_that_is_no_folder_name_is_refused(store: Store) -> None:
    for id in ("../escape", "", ".hidden", "a/b", "a\0b"):
        with pytest.raises(StoreError, match="cannot be the name of a folder"):
            store.save(tiny_run(id))
    assert not store.root.exists()


def test_a_run_is_never_overwritten(store: Store) -> None:
    folder = store.save(make(OLD, "first"))
    with pytest.raises(StoreError, match=r"not empty|exists"):
        store.save(make(OLD, "second"))
    assert store.load(folder).name == "first" and hidden(store) == []


def test_a_dead_writer_is_ignored_and_removed_after_an_hour(store: Store) -> None:
    code = """
        import os, sys
        from pathlib import Path
        from gpulab.store.folders import Store
        from tests.support.strategies import tiny_run
        Store(Path(sys.argv[1])).save(tiny_run(), lambda path: (path.write_bytes(b"half"), os._exit(9)))
    """
    run_python(code, str(store.root), returncode=9)
    (left,) = store.root.iterdir()
    assert left.name.startswith(".saving-") and store.list() == []
    store.save(make(OLD))
    assert left.exists(), "its writer may still be at work"
    hour_ago = time.time() - 3700
    for path in (*left.iterdir(), left):
        os.utime(path, (hour_ago, hour_ago))
    store.save(make(NEW))
    assert not left.exists() and [e.id for e in store.list()] == [OLD, NEW]


def test_two_processes_save_at_once(store: Store) -> None:
    code = """
        import dataclasses, sys
        from pathlib import Path
        from gpulab.store.folders import Store, new_id
        from tests.support.strategies import tiny_run
        store = Store(Path(sys.argv[1]))
        for _ in range(20):
            store.save(tiny_run(new_id()), lambda path: path.write_bytes(b"trace"))
            assert all(e.problem is None for e in store.list()), store.list()
    """
    command = [python_with_torch(), "-c", textwrap.dedent(code), str(store.root)]
    writers = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
    assert [w.wait(300) for w in writers] == [0, 0]
    entries = store.list()
    assert len(entries) == 40 and all(e.problem is None for e in entries)
    assert hidden(store) == []


def run_python(code: str, *args: str, returncode: int = 0) -> str:
    command = [python_with_torch(), "-c", textwrap.dedent(code), *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == returncode, done.stderr
    return done.stdout


# torn, foreign and hostile folders


def test_the_list_sees_a_file_that_is_torn_anywhere(store: Store) -> None:
    """Also between two blocks, where what is left is whole."""
    columns = store.save(make(OLD)) / COLUMNS
    whole = columns.read_bytes()
    for size in range(len(whole) - 1, len(whole) // 2, -1):
        columns.write_bytes(whole[:size])
        [entry] = store.list()
        assert entry.problem is not None and "its columns are damaged" in entry.problem, size


def test_torn_and_foreign_folders_are_listed_with_their_reason(store: Store) -> None:
    (store.root / "broken").mkdir(parents=True)
    with pytest.raises(StoreError, match="There is no run in"):
        store.load("latest")
    (store.root / "broken").rmdir()
    good = store.save(make(NEW, "good"))
    (store.root / "foreign").mkdir()
    (store.root / "notes.txt").write_text("a file is no run")
    (store.root / "json").mkdir()
    (store.root / "json" / DOCUMENT).write_text('{"some": "json"}')
    torn = store.save(make(OLD))
    (torn / COLUMNS).write_bytes((torn / COLUMNS).read_bytes()[:-30])
    problems = {e.id: e.problem for e in store.list()}
    assert list(problems)[-1] == NEW and problems[NEW] is None
    assert problems["foreign"] == "it has no run.json"
    assert "missing required field `schema`" in (problems["json"] or "")
    assert problems[OLD] == "its columns are damaged: rows are missing or have changed"
    assert len(problems) == 4
    assert store.find("latest") == store.find("-1") == good
    with pytest.raises(StoreError, match=r"'foreign' cannot be read: it has no run.json"):
        store.load("foreign")


def edit(folder: Path, **changes: object) -> None:
    document = json.loads((folder / DOCUMENT).read_text())
    (folder / DOCUMENT).write_text(json.dumps(document | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"wall_ns": "long"}, "Expected `int`, got `str`"),
        ({"outcome": "exploded"}, "Invalid enum value 'exploded'"),
        ({"created": "yesterday"}, "no date: 'yesterday'"),
        ({"schema": SCHEMA + 1}, "written by a newer gpulab"),
        ({"traced_numbers": [77]}, "a traced step is not among the steps"),
        ({"steps": 5}, "run.json is corrupt"),
        ({"steps": {"number": {"column": "steps.number", "rows": 6}}}, "missing required field `start_ns`"),
        ({"samples": {"series": [{"name": "x"}]}}, "missing required field"),
    ],
)
def test_a_document_with_a_wrong_field_is_refused(store: Store, changes: dict[str, object], reason: str) -> None:
    store.save(make(OLD))
    folder = store.save(make(MIDDLE))
    edit(folder, **changes)
    store.save(make(NEW))
    if "created" not in changes:  # which only a list of runs goes by
        with pytest.raises(StoreError, match=reason):
            store.load(folder)
    if "traced_numbers" not in changes:  # which a list does not look at
        runs = Runs(store)
        assert [run.id for run in runs] == [OLD, NEW], "it is not counted"
        assert [(row.id, row.position) for row in runs.rows()] == [(NEW, -1), (OLD, -2), (MIDDLE, None)]
        assert re.search(reason, runs.rows()[-1].problem or "")


def in_its_place(change: Callable[[Path], None]) -> Callable[[Path], None]:
    def replaced(document: Path) -> None:
        document.unlink()
        change(document)

    return replaced


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda document: os.truncate(document, 1 << 40), "run.json is larger than 64 MiB"),
        (lambda document: document.write_text('{"schema": 1, "x": ' + "[" * 100_000), "run.json is corrupt"),
        (in_its_place(os.mkfifo), "run.json is not a file"),
    ],
    ids=["too large", "too deep", "a pipe"],
)
def test_a_hostile_document_is_refused(store: Store, change: Callable[[Path], None], problem: str) -> None:
    change(store.save(make(OLD)) / DOCUMENT)
    assert (store.list()[0].problem or "").startswith(problem)


def as_before(folder: Path, name: str = "", member: bytes = b"", compression: int = zipfile.ZIP_STORED) -> None:
    """That run as gpulab 0.1 stored it, but for one column."""
    with (folder / COLUMNS).open("rb") as file:
        members = {column: npy(rows) for column, rows in table_file.read(file).tables.items()}
    members |= {name: member} if name else {}
    with zipfile.ZipFile(folder / NPZ, "w", compression) as archive:
        for column, content in members.items():
            archive.writestr(f"{column}.npy", content)
    (folder / COLUMNS).unlink()
    edit(folder, schema=1)


def npy(array: np.ndarray, **header: object) -> bytes:
    out = io.BytesIO()
    if header:
        np.lib.format.write_array_header_1_0(out, {"descr": "<i8", "fortran_order": False, "shape": (6,)} | header)
        out.write(array.tobytes())
    else:
        np.lib.format.write_array(out, array)
    return out.getvalue()


SIX = np.arange(6)


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (npy(np.array([_Bomb()] * 6, dtype=object)), "is no plain column"),
        (npy(SIX, shape=(10**15,)), "is no plain column"),
        (npy(SIX, shape=(-1,)), "is no plain column"),
        (npy(SIX.reshape(2, 3)), "is no plain column"),
        (npy(SIX.astype(np.float64)), "holds float64 instead of int64"),
        (npy(SIX[:5]), "does not have the 6 rows"),
        (npy(SIX) + b"more", "is no plain column"),
        (b"\x93NUMPY\x01\x00\x10\x00" + b"(" * 16, "is no plain column"),
        (b"\x93NUMPY\x01\x00\xff\x23" + b"(" * 9215, "is no plain column"),
        (b"#!/bin/sh", "is no plain column"),
        (b"", "is no plain column"),
        (npy(SIX[::-1]), None),
    ],
)
def test_a_hostile_column_of_before_is_refused_and_never_run(
    store: Store, member: bytes, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = store.save(make(OLD))
    as_before(folder, "steps.number", member)
    if reason is None:
        assert store.load(folder).steps.number.tolist() == [5, 4, 3, 2, 1, 0], "the test replaces what is read"
    else:
        with pytest.raises(StoreError, match=reason):
            store.load(folder)
    assert not (tmp_path / "exploded").exists()


def test_a_compressed_column_is_refused_before_it_is_unpacked(store: Store) -> None:
    folder = store.save(make(OLD))
    as_before(folder, "steps.number", bytes(10**7), compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(StoreError, match="larger than the file"):
        store.load(folder)
    folder = store.save(make(NEW))
    as_before(folder, "steps.number", npy(SIX), compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(StoreError, match=r"not as gpulab writes it|larger than the file"):
        store.load(folder)


def replace_column(folder: Path, name: str, rows: np.ndarray) -> None:
    with (folder / COLUMNS).open("rb") as file:
        tables = dict(table_file.read(file).tables) | {name: rows}
    with (folder / COLUMNS).open("wb") as file:
        table_file.write(file, tables)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (SIX.astype(np.float64), "holds float64 instead of int64"),
        (SIX[:5], "does not have the 6 rows"),
        (SIX.astype([("a", np.int64)]), "instead of int64"),
        (SIX[::-1], None),
    ],
)
def test_a_wrong_column_is_refused(store: Store, rows: np.ndarray, reason: str | None) -> None:
    folder = store.save(make(OLD))
    replace_column(folder, "steps.number", rows)
    if reason is None:
        assert store.load(folder).steps.number.tolist() == [5, 4, 3, 2, 1, 0], "the test replaces what is read"
    else:
        with pytest.raises(StoreError, match=reason):
            store.load(folder)


def test_a_run_of_before_is_as_one_of_today(store: Store) -> None:
    run = make(OLD, "before")
    folder = store.save(run)
    as_before(folder)
    assert [entry.name for entry in store.list()] == ["before"]
    assert_same(run, store.load("before"))
    assert read(folder, timeline=False).timeline is None
    store.rename("before", "after")
    store.drop_trace("after", "too large")
    assert_same(run.steps, store.load("after").steps)
    assert {path.name for path in folder.iterdir()} == {DOCUMENT, COLUMNS}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_either_harmless_or_a_store_error(data: st.DataObject) -> None:
    document, columns = run_format.encode(tiny_run())
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()):
            document = damaged(document, data)
        else:
            columns = damaged(columns, data)
    try:
        run = run_format.decode(document, io.BytesIO(columns))
    except StoreError:
        return
    run.check()


def damaged(content: bytes, data: st.DataObject) -> bytes:
    at = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["cut", "flip", "insert"]))
    if kind == "cut":
        return content[: at + 1]
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :]
    return content[:at] + data.draw(st.binary(min_size=1, max_size=8)) + content[at:]


# gpulab.runs


def test_stored_runs_come_before_those_of_this_process(store: Store) -> None:
    store.save(make(OLD, "stored"))
    runs = Runs(store)
    assert len(runs) == 1 and runs[-1].name == "stored"
    unsaved = make("20240101-000000-cccccc", "unsaved")
    runs.add(unsaved)
    assert [run.name for run in runs] == ["stored", "unsaved"]
    store.save(make(NEW, "from another notebook"))
    assert runs[-1] is unsaved and runs["unsaved"] is unsaved and runs[unsaved.id] is unsaved
    assert [run.name for run in runs[:2]] == ["stored", "from another notebook"]
    assert runs["stored"].id == OLD and runs["latest"] is unsaved
    with pytest.raises(IndexError, match="no run 3: 3 here"):
        runs[3]
    with pytest.raises(StoreError, match="Did you mean 'stored'"):
        runs["storef"]


def test_a_saved_run_of_this_process_is_not_shown_twice(store: Store) -> None:
    runs = Runs(store)
    run = make(OLD, "cnn")
    runs.add(run, store.save(run))
    assert len(runs) == 1 and runs[0] is run and runs["cnn"] is run


def test_memory_is_bounded_and_saved_runs_stay_reachable(store: Store) -> None:
    runs = Runs(store)
    saved, unsaved = make(OLD, "saved"), make("20250101-000001-dddddd", "unsaved")
    runs.add(saved, store.save(saved))
    runs.add(unsaved)
    for index in range(MOST_IN_MEMORY):
        runs.add(make(f"20250103-{index:06}-eeeeee"))
    assert len(runs) == MOST_IN_MEMORY + 1
    assert runs[0] is not saved
    assert_same(runs[0], saved)
    assert unsaved.id not in [run.id for run in runs]


def test_the_table_names_every_run_and_every_problem(store: Store) -> None:
    store.save(make(OLD, HOSTILE))
    store.save(make(NEW, "cnn", outcome="interrupted"))
    (store.root / "foreign").mkdir()
    runs = Runs(store)
    runs.add(make("20250103-000000-cccccc", "unsaved"))
    shown = repr(runs)
    assert "\x1b" not in shown and "\u202e" not in shown
    lines = shown.splitlines()
    assert lines[0].split() == ["name", "id", "started", "step", "steps", "took", "device", "outcome"]
    assert lines[1].split()[:5] == ["-1", "unsaved", "20250103-000000-cccccc", "(not", "saved)"]
    assert lines[2].split()[:3] == ["-2", "cnn", NEW]
    assert lines[2].split()[6:] == ["10.0", "ms", "6", "60.0", "ms", "a", "CPU", "interrupted"]
    assert lines[-1] == "foreign: unreadable, it has no run.json"
    page = runs._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page and "\x1b" not in page
    assert "1 older run" not in shown and "… and 2 older runs" in repr(runs.listing(1))


def test_an_empty_store_says_so_in_both_views(store: Store) -> None:
    runs = Runs(store)
    assert repr(runs) == f"No run yet in {store.root}."
    assert f">No run yet in {store.root}.</p>" in runs._repr_html_()


def test_a_run_damaged_inside_is_named_in_the_table(store: Store) -> None:
    folder = store.save(make(OLD))
    replace_column(folder, "steps.end_ns", -SIX)
    assert repr(Runs(store)).splitlines()[-1].startswith(f"{OLD}: unreadable, Run '{OLD}' cannot be read:")
