"""Reading another thread's lines from outside: where frames lie, what a stack says, and which looks count."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from gpulab.capture.stack_process import OnCore, Sampling, _Thread
from gpulab.capture.stack_reader import OWN_MEMORY, Layout, StackReader, Unreadable, find_layout, thread_state
from gpulab.capture.stack_sampler import SamplingProcess

pytestmark = pytest.mark.skipif(not os.path.exists(OWN_MEMORY), reason="no file of a process's memory")


@pytest.fixture
def memory() -> Iterator[int]:
    file = os.open(OWN_MEMORY, os.O_RDONLY)
    yield file
    os.close(file)


@pytest.fixture
def layout(memory: int) -> Layout:
    found = find_layout(memory)
    assert found is not None and Layout.of(found._asdict()) == found, "it survives the way to a child"
    return found


class Halted:
    """A thread that stands at a known line of a known function."""

    def __init__(self) -> None:
        self.thread, self.line = 0, 0
        self._there, self._go_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Halted:
        self._thread.start()
        self._there.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._go_on.set()
        self._thread.join()

    def _run(self) -> None:
        self.thread = thread_state()
        self.naïve_grüße(3)

    def naïve_grüße(self, deeper: int) -> None:
        if deeper:
            return self.naïve_grüße(deeper - 1)
        self.line = sys._getframe().f_lineno + 2
        self._there.set()
        self._go_on.wait()


def lines_of(reader: StackReader) -> list[tuple[str, int, str]]:
    return [line for line in reader.frames() if line[0] == __file__]


def test_a_thread_is_seen_at_its_line(memory: int, layout: Layout) -> None:
    with Halted() as halted:
        lines = lines_of(StackReader(memory, layout, halted.thread))
    first = Halted.naïve_grüße.__code__.co_firstlineno
    name = "Halted.naïve_grüße"
    assert lines[0] == (__file__, halted.line, name)
    assert lines[1:4] == [(__file__, first + 2, name)] * 3
    assert lines[4][2] == "Halted._run"


def test_whether_a_thread_runs_python(memory: int, layout: Layout) -> None:
    assert layout.lock, "CPython with a lock"
    with Halted() as halted:
        assert not any(StackReader(memory, layout, halted.thread).holds_lock() for _ in range(50)), "it waits"
    states, ends = list[int](), threading.Event()

    def spin() -> None:
        states.append(thread_state())
        while not ends.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    while not states or not StackReader(memory, layout, states[0]).holds_lock():
        pass
    ends.set()
    thread.join()
    assert StackReader(memory, layout._replace(lock=0), states[0]).holds_lock() is None


def test_impossible_addresses_are_refused_not_followed(memory: int, layout: Layout) -> None:
    for address in (8, 1 << 40, (1 << 64) - 8):
        with pytest.raises(Unreadable):
            list(StackReader(memory, layout, address).frames())


def test_a_wrong_layout_ends_without_an_answer(memory: int, layout: Layout) -> None:
    with Halted() as halted:
        wrong = layout._replace(frame_instruction=layout.frame_code)
        assert lines_of(StackReader(memory, wrong, halted.thread)) == []
        endless = layout._replace(frame_previous=layout.frame_code)
        with pytest.raises(Unreadable):
            list(StackReader(memory, endless, halted.thread).frames())


def test_a_watcher_sees_and_leaves_nothing() -> None:
    watcher = SamplingProcess()
    watcher.start()
    assert watcher.channel is not None
    for _ in range(60):  # a machine at work may start it late
        watcher.wait_until_ready()
    asked = watcher.channel.sample("this thread")
    there = threading.Event()
    while asked and not there.wait(0.05) and watcher.channel is not None:
        watcher.channel.stop("this thread")
        looks = watcher.samples("this thread")
        if looks is not None and looks.t_ns:
            break
        watcher.channel.sample("this thread")
    process = watcher._process
    watcher.stop()
    watcher.stop()
    assert looks is not None
    names = {line[2] for stack in looks.stacks for line in stack if line[0] == __file__}
    assert names == {"test_a_watcher_sees_and_leaves_nothing"}
    assert process is not None and process.poll() is not None and watcher.channel is None


def test_without_memory_files_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulab.capture.stack_sampler.own_layout", lambda: None)
    watcher = SamplingProcess()
    watcher.start()
    assert watcher.channel is None and watcher.samples("anything") is None
    watcher.stop()


# -- which looks count ---------------------------------------------------------------------------------------------


def scripted(arrivals: int, departures: int, state: str, core: int, folder: Path) -> OnCore:
    """A thread as the system's files tell of it."""
    made = OnCore(os.getpid(), threading.get_native_id())
    made.close()
    stat = "7 (a) b) S " + " ".join(["0"] * 35) + " {}"
    status = f"State:\t{state} (x)\nvoluntary_ctxt_switches:\t{departures}\nnonvoluntary_ctxt_switches:\t0\n"
    texts = {"schedstat": f"1 2 {arrivals}\n", "status": status, "stat": stat.format(core), "own": stat.format(0)}
    for name, text in texts.items():
        (folder / name).write_text(text)
    *made._files, made._own = (os.open(folder / name, os.O_RDONLY) for name in texts)
    return made


@pytest.mark.parametrize(
    ("arrivals", "state", "core", "late_s", "counts"),
    [
        (11, "R", 1, 1.0, True),  # it runs on another core: whatever kept the look waiting is no work of its own
        (10, "R", 1, 0.0, False),  # it waits for a core, and may have left one by itself
        (10, "S", 1, 1.0, True),  # it sleeps, and the look came from another core
        (10, "S", 0, 0.0, True),  # it sleeps, and the look came in time
        (10, "S", 0, 1.0, False),  # the look may have come because it fell asleep
    ],
)
def test_a_look_counts_where_nothing_has_chosen_its_time(
    arrivals: int, state: str, core: int, late_s: float, counts: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    moved: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: moved.append(cores))
    thread = scripted(arrivals, 10, state, core, tmp_path)
    thread._cores = {0, 1}
    thread.begin()
    assert thread.is_fair(late_s) is counts
    assert moved == ([{1}] if core == 0 else []), "a look leaves the core of the thread that it looks at"
    thread.close()


@pytest.mark.parametrize(("voluntary", "counts"), [(10, True), (11, False)])
def test_a_thread_whose_core_was_taken_is_at_no_chosen_line(
    voluntary: int, counts: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    thread = scripted(10, 10, "R", 1, tmp_path)
    thread.begin()
    thread.is_fair(0.0)
    scripted(10, voluntary, "R", 1, tmp_path).close()
    assert thread.is_fair(1.0) is counts
    thread.close()


@pytest.mark.parametrize(("late_s", "counts"), [(0.0, True), (1.0, False)])
def test_who_stays_on_the_core_of_a_thread_stops_it_in_time(
    late_s: float, counts: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    moved: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: moved.append(cores))
    thread = scripted(10, 10, "R", 1, tmp_path)
    thread._cores, thread.stays = {0, 1}, True
    thread.begin()
    assert thread.is_fair(late_s) is counts
    thread.end()
    assert moved == [{0, 1}, {1}], "between two looks it waits there"
    thread.close()


@pytest.mark.parametrize(("release", "prompt"), [("6.11.0-generic", False), ("6.12.3", True)])
def test_a_short_slice_is_asked_for_where_it_counts(release: str, prompt: bool) -> None:
    """In a process of its own, which keeps it."""
    code = (
        "import os, types; from gpulab.capture import stack_process as process\n"
        f"os.uname = lambda: types.SimpleNamespace(machine='x86_64', release={release!r})\n"
        "import ctypes; asked = []\n"
        "ctypes.CDLL = lambda _: types.SimpleNamespace(syscall=lambda *args: asked.append(args) or 0)\n"
        "print(process.becomes_prompt(), len(asked))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == [str(prompt), str(int(prompt))]


@pytest.mark.parametrize(
    ("looks", "spares", "stays", "share"),
    [
        (0, False, False, 0.3),  # of the profiled window, which may be short
        (0, True, False, 0.3),  # of a run, which may be short, too
        (200, False, False, 0.05),
        (200, True, False, 0.003),  # of what goes on all the time
        (0, False, True, 0.02),  # of a thread that each look stops
    ],
)
def test_what_looks_cost_is_bounded(looks: int, spares: bool, stays: bool, share: float) -> None:
    nothing: Any = None
    looking = Sampling(nothing, nothing, os.getppid())
    core: Any = SimpleNamespace(stays=stays)
    watched = _Thread(nothing, core, -1, 0.002, spares=spares, inside=None, most=2_000 if stays else None)
    watched.t_ns = [0] * looks
    looking._threads["a thread"], looking._cost_s = watched, 0.0003
    assert looking._pause_s(watched) == pytest.approx(0.0003 / share)


def test_it_ends_with_its_parent_though_a_fork_holds_the_pipes() -> None:
    """A kernel that is killed or restarted says nothing; a worker that outlives it keeps its pipes open."""
    code = (
        "import os, signal, subprocess, sys, time\n"
        "from gpulab.capture.stack_sampler import SamplingProcess\n"
        "watcher = SamplingProcess(); watcher.start()\n"
        "fork = os.fork()\n"
        "if not fork:\n    os.close(1); os.read(0, 1); os._exit(0)\n"
        "print(watcher._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        child = psutil.Process(int(killed.stdout.readline()))
        psutil.wait_procs([child], timeout=60)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_the_child_needs_neither_numpy_nor_torch() -> None:
    code = "import gpulab.capture.stack_process, sys; print([m for m in ('numpy', 'torch') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
