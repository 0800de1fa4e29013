"""A run whose process was killed is one for the next reader, once, and for none while the process lives."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.run import Run, Samples, Series, Steps
from gpulab.store import folders
from gpulab.store.files import orphaned
from gpulab.store.folders import RUNNING_PREFIX, Store, read
from gpulab.store.journal import Journal
from gpulab.store.run_format import MARKS, READING, READINGS
from tests.support.fork_server import python_with_torch
from tests.support.strategies import assert_same, tiny_run
from tests.support.tapes import steps_by_hand

COUNT = 7
ORIGIN_NS = 1_000


def sketch(run_id: str = "20260101-000000-abcdef") -> Run:
    nothing = np.empty(0, np.int64), np.empty(0, np.float64)
    curves = tuple(Series(name, "%", name, "psutil", *nothing) for name in ("cpu_pct", "rss_bytes"))
    return replace(tiny_run(run_id), steps=Steps.empty(), samples=Samples(curves), timeline=None, wall_ns=5)


def journal_of(root: Path, run: Run) -> Journal:
    """As a process that goes on leaves it."""
    journal = Journal(root, run.id, ORIGIN_NS)
    journal.write_document(run)
    journal.append(MARKS, steps_by_hand(COUNT, 100, start_ns=ORIGIN_NS).tobytes())
    readings = np.array([(0, 10, 50.0), (1, 10, 7.0), (0, 900, 60.0)], READING)
    journal.append(READINGS, readings.tobytes())
    return journal


def test_what_was_written_is_the_run(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, sketch())
    run = read(journal.path.parent)
    run.check()
    copy = shutil.copytree(journal.path.parent, tmp_path / ".running-20260101-000000-fedcba")
    (copy / ".run.json-abcdef").write_bytes(b"half of it")
    assert_same(run, Store(tmp_path).load("latest"))
    assert {path.name for path in (tmp_path / "20260101-000000-fedcba").iterdir()} == {
        folders.DOCUMENT,
        folders.COLUMNS,
    }
    assert run.outcome == "interrupted" and run.outcome_detail == "its process was killed"
    assert run.steps.start_ns.tolist() == [100 * n for n in range(COUNT)] and set(run.steps.sample_count) == {32}
    curves = {s.name: (s.t_ns.tolist(), s.value.tolist()) for s in run.samples.series}
    assert curves == {"cpu_pct": ([10, 900], [50.0, 60.0]), "rss_bytes": ([10], [7.0])}
    assert run.wall_ns == 900 and run.missing[-1].key == "breakdown"
    journal.remove()


def test_the_next_reader_stores_it(tmp_path: Path) -> None:
    run = sketch()
    journal = journal_of(tmp_path, run)
    assert not Store(tmp_path).list(), "its process lives"
    journal.close()  # as the system does when the process ends
    (entry,) = Store(tmp_path).list()
    assert entry.id == run.id and entry.outcome == "interrupted" and list(tmp_path.iterdir()) == [entry.path]
    assert len(Store(tmp_path).load("latest").steps) == COUNT


@pytest.mark.parametrize("trace", ["none", "half", "whole"])
def test_a_process_killed_while_it_writes_its_trace(tmp_path: Path, trace: str) -> None:
    """The run is stored first, and its trace takes longer than all the rest."""
    store, run = Store(tmp_path), replace(tiny_run(), outcome="completed")
    folder = store.save(run, (lambda path: path.touch()) if trace == "whole" else None)
    journal_of(tmp_path, sketch(run.id)).close()
    if trace == "half":
        (folder / folders.UNFINISHED_TRACE).write_bytes(b"half of it")
    (entry,) = store.list()
    stored = store.load(entry.id)
    assert entry.outcome == "completed" and stored.steps.start_ns.tolist() == run.steps.start_ns.tolist()
    assert list(tmp_path.iterdir()) == [folder]
    if trace == "whole":
        assert stored.missing == run.missing and folders.trace_path(folder) is not None
    else:
        assert [(m.key, m.reason) for m in stored.missing[-1:]] == [("trace_file", "its process was killed")]
        assert {path.name for path in folder.iterdir()} == {folders.DOCUMENT, folders.COLUMNS}


def test_many_readers_store_it_once(tmp_path: Path) -> None:
    journal_of(tmp_path, sketch()).close()
    problems = list[BaseException]()

    def read() -> None:
        try:
            Store(tmp_path).list()
        except BaseException as e:
            problems.append(e)

    readers = [threading.Thread(target=read) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    (entry,) = Store(tmp_path).list()
    assert not problems and entry.problem is None and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("cut", [0, 1, 40, 200, -1, -40])
def test_a_torn_file_hurts_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    journal = journal_of(tmp_path, sketch())
    journal.close()
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole[:cut])
    entries = Store(tmp_path).list()
    assert len(entries) == (cut not in (0, 1, 40, 200)) and all(entry.problem is None for entry in entries)
    monkeypatch.setattr(folders, "_STALE_AFTER_S", -3600.0)
    Store(tmp_path).list()
    assert not journal.path.exists(), "what tells nothing goes after an hour"


def test_where_it_cannot_be_stored_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = journal_of(tmp_path, sketch())
    journal.close()

    def full(*arguments: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "rename", full)
    (entry,) = Store(tmp_path).list()
    assert entry.problem == "its process was killed: No space left on device"
    assert journal.path.exists(), "another try comes"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_children_of_a_killed_process_do_not_hold_it(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, sketch())
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, b".")
        signal.pause()
        os._exit(0)
    os.read(read_end, 1)
    journal.close()
    try:
        with orphaned(journal.path, 3600.0) as ours:
            assert ours
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read_end)
        os.close(write_end)


SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.zeros(100_000, 2))
weight = torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step, (x,) in enumerate(DataLoader(data, batch_size=4, num_workers=1)):
    (x * weight).sum().backward()
    optimizer.step()
    print(step + 1, flush=True)
"""


def _holds(runs_folder: Path, words: bytes) -> bool:
    """Whether that much of the run is on disk by now: it writes about once a second."""
    return any(words in path.read_bytes() for path in runs_folder.glob(f"{RUNNING_PREFIX}*/run.json"))


@pytest.mark.parametrize("last_step", [400, 1500])
def test_a_real_run_that_is_killed_is_kept(tmp_path: Path, own_store: Path, last_step: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [python_with_torch(), "-m", "gpulab", "record", "--no-live", str(script)]
    runs = Store(own_store / "runs")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        runs_folder = own_store / "runs"
        for line in process.stdout:
            if int(line) >= last_step and _holds(runs_folder, b'"num_workers":1'):
                break
        process.kill()
    entry = _wait_for_entry(runs)
    run = runs.load(entry)
    assert run.outcome == "interrupted" and run.source == "script" and "optimizer.step()" in run.code
    assert run.loader is not None and run.loader.num_workers == 1 and run.environment.packages["torch"]
    assert not list(runs_folder.glob(f"{RUNNING_PREFIX}*"))


def _wait_for_entry(runs: Store) -> str:
    """The system may take a moment to take the lock back."""
    import time

    while not (entries := runs.list()):
        time.sleep(0.05)
    return entries[0].id
