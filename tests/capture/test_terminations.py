"""SIGTERM writes the run first; then the process does what it would have done without gpulab."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from gpulab.capture import threads
from gpulab.capture.recorder import Capture
from gpulab.capture.threads import Terminations
from gpulab.run import Settings
from gpulab.store.folders import RUNNING_PREFIX, Store
from tests.support.fork_server import python_with_torch

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM here")

TERM = signal.SIGTERM


@pytest.fixture(autouse=True)
def handler_before() -> Iterator[list[str]]:
    """Of the process: writes down that it was called."""
    heard = list[str]()
    before = signal.signal(TERM, lambda number, frame: heard.append("before"))
    functions = signal.signal, signal.getsignal
    yield heard
    assert (signal.signal, signal.getsignal) == functions
    signal.signal(TERM, before)


def begun() -> tuple[list[str], Terminations]:
    """What it is told, and it."""
    told = list[str]()
    terminations = Terminations(lambda: told.append("soon"), lambda: told.append("at once"))
    terminations.begin()
    return told, terminations


def test_each_signal_is_told_and_delivered_at_the_end(handler_before: list[str]) -> None:
    told, terminations = begun()
    for _ in range(3):
        signal.raise_signal(TERM)
    assert told == ["soon", "at once", "at once"] and not handler_before
    _, without = begun()
    without.end()
    without.deliver()
    assert not handler_before, "it had no signal"
    terminations.end()
    terminations.end()
    terminations.deliver()
    terminations.deliver()
    assert handler_before == ["before"]


def test_a_handler_that_the_code_sets_is_the_one_that_is_asked(handler_before: list[str]) -> None:
    told = list[str]()

    def own(number: int, frame: FrameType | None) -> None:
        told.append("own")

    terminations = Terminations(lambda: told.append("soon"), lambda: None)
    before = signal.getsignal(TERM)
    terminations.begin()
    assert signal.getsignal(TERM) is before
    assert signal.signal(TERM, own) is before and signal.getsignal(TERM) is own
    with pytest.raises(TypeError):
        signal.signal(TERM, "no handler")  # type: ignore[arg-type]
    signal.raise_signal(TERM)
    assert told == ["soon"]
    terminations.end()
    assert signal.getsignal(TERM) is own
    terminations.deliver()
    assert told == ["soon", "own"] and not handler_before


def test_what_ignores_the_signal_goes_on() -> None:
    told, terminations = begun()
    signal.signal(TERM, signal.SIG_IGN)
    signal.raise_signal(TERM)
    terminations.end()
    terminations.deliver()
    assert not told and signal.getsignal(TERM) is signal.SIG_IGN


def no_thread() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "gpulab-terminations"]


def test_a_thread_hears_it_too_and_asks_again_in_vain_of_none(
    handler_before: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no step comes, the second signal is ours."""
    monkeypatch.setattr(threads, "GRACE_S", 0.01)
    heard, told, second = list[int](), list[str](), threading.Event()

    def at_once() -> None:
        told.append("at once")
        second.set()

    terminations = Terminations(lambda: told.append("soon"), at_once, lambda: heard.append(threading.get_ident()))
    terminations.begin()
    signal.raise_signal(TERM)
    second.wait()
    terminations.end()
    assert told == ["soon", "at once"] and not handler_before and no_thread()
    assert len(heard) == 2 and threading.get_ident() not in heard
    assert signal.set_wakeup_fd(-1) == -1


def test_a_run_that_is_being_finished_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "GRACE_S", 0.0)
    told, terminations = begun()
    terminations.be_patient()
    signal.raise_signal(TERM)
    assert terminations._thread is not None
    terminations._thread.join()
    terminations.end()
    assert told == ["soon"] and no_thread()


def test_a_wakeup_descriptor_of_the_code_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio has one, before the run or within it."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    terminations = Terminations(lambda: None, lambda: None)
    try:
        for before in (True, False):
            if before:
                signal.set_wakeup_fd(writes)
            terminations.begin()
            signal.set_wakeup_fd(writes)
            terminations.end()
            assert signal.set_wakeup_fd(-1) == writes and no_thread()
    finally:
        os.close(reads)
        os.close(writes)


STUCK = """
import ctypes, signal, threading
from gpulab.capture import threads as module
module.GRACE_S, module.ANSWER_S = 0.2, 0.2
terminations = module.Terminations(lambda: None, lambda: None, lambda: print("heard", flush=True))
terminations.begin()
{handler}
def say():
    terminations._thread.join()
    print("goes on", flush=True)
threading.Thread(target=say, daemon=True).start()
mutex = ctypes.create_string_buffer(64)
print("waits", flush=True)
for _ in range(2):  # the second time in vain, and no signal ends it
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
HANDLER = "signal.signal(signal.SIGTERM, lambda number, frame: print('own', flush=True))"


@pytest.mark.skipif(sys.platform != "linux", reason="needs a call that waits in C")
@pytest.mark.parametrize("handler", ["", HANDLER], ids=["no handler", "a handler"])
def test_who_waits_in_c_ends_as_without_gpulab(handler: str) -> None:
    """A rank in a collective whose other rank never comes: Python calls no handler, neither ours nor the code's."""
    command = [python_with_torch(), "-c", STUCK.format(handler=handler)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline()]
        process.send_signal(TERM)
        said += [process.stdout.readline() for _ in range(3)]
        process.kill()
    assert said[:3] == ["waits\n", "heard\n", "heard\n"]
    if handler:
        assert said[3] == "goes on\n" and process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == -TERM


def test_a_run_within_a_run(handler_before: list[str]) -> None:
    of_outer, outer = begun()
    of_inner, inner = begun()
    signal.raise_signal(TERM)
    inner.end()
    assert (of_inner, of_outer) == (["soon"], [])
    inner.deliver()
    assert of_outer == ["soon"] and not handler_before
    outer.end()
    outer.deliver()
    assert handler_before == ["before"]


def test_a_forked_child_has_the_handler_of_before(handler_before: list[str]) -> None:
    terminations = Terminations(lambda: os._exit(3), lambda: None)
    terminations.begin()
    child = os.fork()
    if child == 0:
        signal.raise_signal(TERM)
        os._exit(0 if handler_before == ["before"] else 4)
    _, status = os.waitpid(child, 0)
    terminations.end()
    assert os.waitstatus_to_exitcode(status) == 0


TRAINING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.zeros(100_000, 2))
weight = torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
step = 0
for (x,) in DataLoader(data, batch_size=4, num_workers=1):
    (x * weight).sum().backward()
    optimizer.step()
    step += 1
    if step == 50:
        print("training", flush=True)
    {after}
"""
OWN = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda n, f: (print('own', flush=True), sys.exit(7)))\n"
FLAG = "import signal, sys\nstop = []\nsignal.signal(signal.SIGTERM, lambda n, f: stop.append(n))\n"
CHECKPOINT = "if stop: print('checkpoint at', step, flush=True); sys.exit(5)"
WAITS = "if step == 60: print('waits', flush=True); [None for _ in iter(int, 1)]"


def terminated(tmp_path: Path, script: str, *, at: str = "training", signals: int = 1) -> tuple[int, str]:
    """The script's exit code and its output, after so many signals from when it printed `at`."""
    file = tmp_path / "train.py"
    file.write_text(script)
    command = [python_with_torch(), "-m", "gpulab", "record", "--no-live", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith(at):
                process.send_signal(TERM)
                if signals == 1:
                    break
            if signals > 1 and "waits" in said:
                break
        if signals > 1:
            while process.poll() is None:  # a signal that comes while one is handled counts as the same
                process.send_signal(TERM)
                try:
                    process.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
        said += process.stdout.read()
    return process.returncode, said


@pytest.mark.parametrize(
    ("before", "after", "code", "words"),
    [("", "", -TERM, ""), (OWN, "", 7, "own"), (FLAG, CHECKPOINT, 5, "checkpoint")],
    ids=["no handler", "a handler that exits", "a handler that sets a flag"],
)
def test_a_script_is_asked_to_end(
    tmp_path: Path, own_store: Path, before: str, after: str, code: int, words: str
) -> None:
    status, said = terminated(tmp_path, before + TRAINING.format(after=after))
    assert status == code, said
    runs = Store(own_store / "runs")
    (entry,) = runs.list()
    run = runs.load(entry.id)
    assert run.outcome == "interrupted" and run.outcome_detail == "SIGTERM" and len(run.steps) >= 50
    assert "interrupted" in said and words in said.rpartition("gpulab report")[2]
    assert not list((own_store / "runs").glob(f"{RUNNING_PREFIX}*"))


def test_where_no_step_comes_the_second_signal_writes(tmp_path: Path, own_store: Path) -> None:
    status, said = terminated(tmp_path, TRAINING.format(after=WAITS), at="waits", signals=2)
    assert status == -TERM, said
    (entry,) = Store(own_store / "runs").list()
    assert entry.outcome == "interrupted" and len(Store(own_store / "runs").load(entry.id).steps) >= 59


def test_a_signal_while_the_run_is_finished_waits_for_its_end(
    handler_before: list[str], own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many come: what is half finished is not finished a second time within."""
    kept = list[object]()
    capture = Capture(Settings(trace=False, live=False), "block", keep=lambda run, write: kept.append(run))
    capture.start()
    ends = capture._pilot.ends

    def interrupted(end_ns: int) -> None:
        for _ in range(3):
            signal.raise_signal(TERM)
        ends(end_ns)

    monkeypatch.setattr(capture._pilot, "ends", interrupted)
    run, _ = capture.finish("completed")
    assert not kept and not capture.terminated and not handler_before and run.outcome == "completed"
    capture.close()
    assert handler_before == ["before"]
