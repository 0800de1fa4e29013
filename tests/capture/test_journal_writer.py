"""Steps go to a journal while a run goes on; the record is the same, and nothing is left of it."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gpulab.capture.recorder import Capture
from gpulab.run import Run, Settings
from gpulab.store.folders import COLUMNS, RUNNING_PREFIX
from gpulab.store.journal import Journal, JournalWriter
from gpulab.store.run_format import MARKS
from gpulab.store.table_file import read
from gpulab.tape.step_finder import steps_of

STEPS = 40


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look writes."""
    monkeypatch.setattr("gpulab.store.journal.PERIOD_S", 0.005)


def _write(capture: Capture) -> None:
    """All that there is by now, though a thread of ours may be at it."""
    with capture._journal_writer._lock, suppress(OSError):
        if (journal := capture._journal_writer._journal) is not None:
            capture._write_so_far(journal)


def _run(settings: Settings, store: Path, *, is_saved: bool) -> Run:
    """Two epochs of twenty steps; all but the newest are in the journal after each where they go there."""
    data = TensorDataset(torch.zeros(4 * STEPS // 2, 2))
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    capture = Capture(settings, "block")
    capture.start()
    try:
        for _ in range(2):
            for (x,) in DataLoader(data, batch_size=4):
                (x * weight).sum().backward()
                optimizer.step()
                _write(capture)
        files = list((store / "runs").glob(f"{RUNNING_PREFIX}*/{COLUMNS}")) if (store / "runs").is_dir() else []
        assert len(files) == is_saved
        for file in files:
            assert len(steps_of(read(file.open("rb")).tables[MARKS], 0)) >= STEPS - 2
    finally:
        run, _ = capture.finish("completed")
        capture.close()
    return run


@pytest.mark.parametrize("saves", [True, False])
def test_the_record_has_all_steps_and_no_file_is_left(own_store: Path, saves: bool) -> None:
    run = _run(Settings(trace=False, live=False, save=saves), own_store, is_saved=saves)
    run.check()
    assert len(run.steps) == STEPS and run.steps.batch_count.tolist() == [1] * STEPS
    assert run.steps.sample_count.tolist() == [4] * STEPS
    assert not list(own_store.rglob(f"{RUNNING_PREFIX}*"))


def test_a_store_that_cannot_be_written_to_is_said_once(own_store: Path) -> None:
    own_store.parent.mkdir(parents=True, exist_ok=True)
    own_store.write_text("a file where the folder should be")
    run = _run(Settings(trace=False, live=False), own_store, is_saved=False)
    assert len(run.steps) == STEPS
    (choice,) = [choice for choice in run.choices if choice.what == "steps so far"]
    assert choice.value == "kept in memory" and str(own_store) in choice.reason


def test_only_one_thread_writes_and_none_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulab.store.journal.PERIOD_S", 3600.0)
    inside, may_end, written = threading.Event(), threading.Event(), list[int]()

    def write(journal: Journal) -> None:
        written.append(threading.get_ident())
        inside.set()
        may_end.wait()

    writer = JournalWriter(Journal(tmp_path, "run", 0), write)
    thread = threading.Thread(target=writer.update)
    thread.start()
    inside.wait()
    writer.update()
    assert written == [thread.ident]
    may_end.set()
    thread.join()
    writer.close()
    assert written == [thread.ident, threading.get_ident()], "the last of it is written when the run ends"
    writer.update()
    assert len(written) == 2 and not writer.problems
    short = JournalWriter(Journal(tmp_path, "short", 0), write)
    short.start()
    short.close()
    assert len(written) == 2, "a run too short for a journal writes nothing"
    assert not [thread for thread in threading.enumerate() if thread.name == "gpulab-journal"]


def test_steps_are_written_though_the_meters_are_gone(own_store: Path) -> None:
    """Whatever kills the sampling process, the OOM killer for one, must not stop the writing."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    capture = Capture(Settings(trace=False, live=False), "block")
    capture.start()
    try:
        process = capture._sampler._process
        assert process is not None
        process.kill()
        process.wait()
        for _ in range(STEPS):
            optimizer.step()

        def on_disk() -> int:
            files = list((own_store / "runs").glob(f"{RUNNING_PREFIX}*/{COLUMNS}"))
            with suppress(ValueError):  # its header is being written
                return len(steps_of(read(files[0].open("rb")).tables[MARKS], 0)) if files else 0
            return 0

        while on_disk() < STEPS - 1:
            assert capture._journal_writer._thread is not None and capture._journal_writer._thread.is_alive()
            threading.Event().wait(0.01)
    finally:
        capture.finish("completed")
        capture.close()


def test_a_fault_is_said_and_the_next_second_tries_again(tmp_path: Path) -> None:
    """What fails while another thread imports torch must not cost the journal of the whole run."""
    calls = list[int]()

    def write(journal: Journal) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("broken")

    writer = JournalWriter(Journal(tmp_path, "run", 0), write)
    writer.update()
    assert "broken" in writer.problems[0].reason
    writer.update()
    assert len(calls) == 2 and not writer.problems
