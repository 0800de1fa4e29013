"""The child process that samples stacks, started by `stack_sampler`; it imports neither NumPy nor torch.

A process that wants a thread sampled (the training process or a worker of its DataLoader) sends a message on a socket,
together with an open file of its own memory, so that no rights over another process are needed. Each message is one
JSON object:

    {"sample": key, "thread": address, "process": number, "task": number, "period_s": s,
     "inside": null | [suffix of a file's name, suffix of a function's name], "spares": whether it makes batches,
     "fills_cores": whether its operators use all cores, "most": samples to keep, null for many}
    {"stop": key}                                          stop, and send the samples

On its output the child writes one JSON object a line:

    {"ready": true}                                        once, first
    {"stopped": key, "t_ns": [time, …], "stack": [number, …], "holds_lock": [whether it runs Python, …],
     "stacks": [[number, …], …], "lines": [[file, line, function], …], "began_ns": time}

`inside`: only samples within that function count. `most`: set for a whole run, whose samples are evenly spaced. Times
are of `time.perf_counter_ns`, one clock for all processes of a machine. The child ends at the end of its input, and
with its parent.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import struct
from collections import deque
from contextlib import suppress
from random import uniform
from time import perf_counter, perf_counter_ns, thread_time
from typing import Any

from gpulab.capture.stack_reader import Layout, Spot, StackReader, Unreadable

MESSAGE_BYTES = 1 << 16
SHARE = 0.05  # of one core, at most, for sampling: if a sample costs more, fewer are taken
STAYING_SHARE = 0.02  # the same if a sample stops the thread, which costs the thread several times the sample's time
SPARING_SHARE = 0.003  # the same for loading, which is sampled all the time, after its first samples
EAGER_SAMPLES, MOST_EAGER = 60, 2_000  # loading is sampled eagerly until so many samples count or were taken
FIRST_PERIOD_S, FIRST_SAMPLES = 0.001, 200  # at the start of a window or run, which may be short
FIRST_SHARE = 0.3  # of one core, at most, for these first samples
MOST_SAMPLES = 20_000  # of one thread; whenever it has so many, half of them are dropped and the period doubles
RETRIES = 16  # if a stack cannot be read: in fast and deep Python code every second try fails
LONGEST_S = 1.0  # between two checks that the parent lives
_STARTING_COST_S = 1e-4
_COSTS = 9  # a sample's cost is the median of so many: the first sample in a function also reads its line table


class _Thread:
    """One thread and its samples. No dataclass: importing that module takes as long as a hundred samples."""

    def __init__(
        self,
        reader: StackReader,
        core: OnCore,
        file: int,
        period_s: float,
        *,
        spares: bool,
        inside: tuple[str, str] | None,
        most: int | None = None,
    ) -> None:
        self.reader, self.core, self.file = reader, core, file
        self.period_s, self.spares, self.inside = period_s, spares, inside
        self.most, self.is_even = most or MOST_SAMPLES, most is not None
        self.due_s, self.began_ns = perf_counter(), perf_counter_ns()
        self.t_ns: list[int] = []
        self.stacks: list[int] = []
        self.holds_lock: list[bool | None] = []
        self.numbers: dict[tuple[Spot, ...], int] = {}
        self.rejected = 0  # samples outside of `inside`, or not fair (`OnCore`)
        self._ends: tuple[str | int, ...] | None = None  # file and function of the thread's outermost frame

    @property
    def is_settled(self) -> bool:
        """Whether eager sampling may end."""
        return len(self.t_ns) >= EAGER_SAMPLES or self.sample_count >= MOST_EAGER

    @property
    def sample_count(self) -> int:
        """All samples, including those that do not count."""
        return len(self.t_ns) + self.rejected

    def sample(self) -> None:
        """Take one sample. Frames are copied first: once this process takes the thread's core, the thread stops."""
        self.reader.take()
        now_ns, holds_lock = perf_counter_ns(), self.reader.holds_lock()
        late_s = now_ns / 1e9 - self.due_s
        self.core.begin()
        try:
            lines = self._read()
            fair = lines is not None and self.core.is_fair(late_s)
        finally:
            self.core.end()
        # even samples measure shares of all time, including waiting
        if lines is None or not (fair or (self.is_even and late_s <= IN_TIME_S)):
            self.rejected += 1
            return
        self.t_ns.append(now_ns)
        self.stacks.append(self.numbers.setdefault(lines, len(self.numbers)))
        self.holds_lock.append(holds_lock)
        if len(self.t_ns) >= self.most:
            self.t_ns, self.stacks, self.holds_lock = self.t_ns[::2], self.stacks[::2], self.holds_lock[::2]
            self.period_s *= 2

    def close(self) -> None:
        """Close the files."""
        self.core.close()
        os.close(self.file)

    def _read(self) -> tuple[Spot, ...] | None:
        """Retry if the thread has moved meanwhile: code with many calls must not be sampled less often."""
        for _ in range(RETRIES):
            with suppress(Unreadable):
                lines = self._lines()
                if self.inside is not None or (lines and lines[-1][::2] == self._ends):
                    return lines
        lines = self._lines()
        self._ends = lines[-1][::2] if lines else None
        return lines

    def _lines(self) -> tuple[Spot, ...] | None:
        """The stack, up to the function `inside`; None if the thread is not within it."""
        if self.inside is None:
            return tuple(self.reader.frames())
        within: list[Spot] = []
        file, function = self.inside
        for line in self.reader.frames():
            within.append(line)
            if line[2].endswith(function) and line[0].endswith(file):
                return tuple(within)
        return None

    def answer(self, key: str) -> dict[str, object]:
        numbers: dict[Spot, int] = {}
        stacks = [[numbers.setdefault(line, len(numbers)) for line in stack] for stack in self.numbers]
        return {
            "stopped": key,
            "t_ns": self.t_ns,
            "stack": self.stacks,
            "holds_lock": [] if None in self.holds_lock else self.holds_lock,
            "stacks": stacks,
            "lines": list(numbers),
            "began_ns": self.began_ns,
        }


class Sampling:
    """Samples all requested threads until the parent is gone."""

    def __init__(self, messages: socket.socket, layout: Layout, parent_pid: int, *, is_prompt: bool = False) -> None:
        self._messages, self._layout, self._parent_pid = messages, layout, parent_pid
        self._threads: dict[str, _Thread] = {}
        self._costs_s = deque([_STARTING_COST_S] * _COSTS, maxlen=_COSTS)
        self._cost_s = _STARTING_COST_S
        self._is_prompt = is_prompt

    def run(self) -> None:
        """Sample and answer until the input ends."""
        write_message({"ready": True})
        while os.getppid() == self._parent_pid:
            due_s = min((w.due_s for w in self._threads.values()), default=perf_counter() + LONGEST_S)
            timeout_s = min(max(due_s - perf_counter(), 0.0), LONGEST_S)
            readable = select.select([self._messages.fileno(), 0], [], [], timeout_s)[0]
            if 0 in readable:
                return
            if readable:
                self._receive()
            self._sample_due()

    def _sample_due(self) -> None:
        began_s = perf_counter()
        due = [(key, w) for key, w in self._threads.items() if w.due_s <= began_s]
        spent_s = thread_time()
        for key, thread in due:
            try:
                thread.sample()
            except Unreadable:
                self._drop_if_gone(key)
            except (OSError, ValueError, IndexError):  # the thread has ended
                thread.due_s = float("inf")
        if due:
            self._costs_s.append((thread_time() - spent_s) / len(due))
            self._cost_s = sorted(self._costs_s)[_COSTS // 2]
        for _, thread in due:
            if thread.due_s < float("inf"):
                thread.due_s = perf_counter() + self._pause_s(thread) * uniform(0.5, 1.5)  # loops are periodic too

    def _pause_s(self, thread: _Thread) -> float:
        """The time to the next sample, on average."""
        if thread.sample_count < FIRST_SAMPLES and not thread.is_even:
            return max(FIRST_PERIOD_S, self._cost_s * len(self._threads) / FIRST_SHARE)
        sparing = sum(thread.spares for thread in self._threads.values())
        spares = thread.spares and thread.is_settled
        share = SPARING_SHARE / sparing if spares else SHARE / len(self._threads)
        if thread.is_even and thread.core.stays:
            share = min(share, STAYING_SHARE)
        return max(thread.period_s, self._cost_s / share)

    def _drop_if_gone(self, key: str) -> None:
        """Stop sampling if the process has ended: then it has no memory, although the file is open."""
        thread = self._threads[key]
        with suppress(OSError):
            if os.pread(thread.file, 8, thread.reader.thread):
                return
        thread.due_s = float("inf")

    def _receive(self) -> None:
        data, files, _, _ = socket.recv_fds(self._messages, MESSAGE_BYTES, 1)
        try:
            message = json.loads(data)
        except ValueError:
            message = {}
        if "sample" in message and files:
            self._begin(message, files.pop())
        elif "stop" in message:
            thread = self._threads.pop(message["stop"], None)
            if thread is not None:
                thread.close()
            write_message(thread.answer(message["stop"]) if thread is not None else {"stopped": message["stop"]})
        for file in files:
            os.close(file)

    def _begin(self, message: dict[str, object], file: int) -> None:
        key, address, inside = str(message["sample"]), message["thread"], message.get("inside")
        process, task = message["process"], message["task"]
        assert isinstance(address, int) and isinstance(process, int) and isinstance(task, int)
        if key in self._threads:
            self._threads.pop(key).close()
        try:
            core = OnCore(process, task, stays=self._is_prompt and message.get("fills_cores") is True)
        except OSError:
            os.close(file)
            return
        self._threads[key] = _Thread(
            reader=StackReader(file, self._layout, address),
            core=core,
            file=file,
            period_s=float(str(message["period_s"])),
            spares=bool(message["spares"]),
            inside=(str(inside[0]), str(inside[1])) if isinstance(inside, list) else None,
            most=most if isinstance(most := message.get("most"), int) else None,
        )


def main(messages: int, layout: dict[str, Any], parent_pid: int) -> None:
    """Sample as requested on the socket `messages`; `layout` has the fields of a `Layout`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is meant for the training
    with socket.socket(fileno=messages) as requests, suppress(BrokenPipeError):
        Sampling(requests, Layout.of(layout), parent_pid, is_prompt=becomes_prompt()).run()


def becomes_prompt() -> bool:
    """Ask to run as soon as this process wakes, before others on its core; returns whether the system grants it.

    Linux's scheduler prefers a task with a shorter slice (EEVDF, `PREEMPT_SHORT`, since 6.12).
    """
    number = _SET_ATTRIBUTES.get(os.uname().machine)
    release = tuple(int(n) for n in re.findall(r"\d+", os.uname().release)[:2])
    if number is None or release < _SHORT_SLICES_SINCE:
        return False
    import ctypes

    attributes = struct.pack("IIQiIQQQ", 48, 0, 0, 0, 0, _SLICE_NS, 0, 0)  # struct sched_attr, version 0
    return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)


def write_message(message: dict[str, object]) -> None:
    """The same as in `own_processes`, whose imports take too long here."""
    line = (json.dumps(message) + "\n").encode()
    while line:
        line = line[os.write(1, line) :]


# A sample is a fair draw of a thread's time unless this process had to wait until the thread paused, or the thread
# paused because it waited for this process's core. If compute threads fill all cores, one of the two is always the
# case: then this process takes the thread's own core, and the thread stops at its current line.


_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}  # sched_setattr, Linux
_SHORT_SLICES_SINCE, _SLICE_NS = (6, 12), 100_000  # the shortest slice that Linux grants
IN_TIME_S = 0.0005  # a sample that begins so soon after it was due has not waited for a core
_SWITCHES = re.compile(rb"^(nonvoluntary|voluntary)_ctxt_switches:\s*(\d+)", re.MULTILINE)
_STATE = re.compile(rb"^State:\s*(\w)", re.MULTILINE)
_READY = b"R"
_CORE_FIELD = 36  # of stat, after the name


class OnCore:
    """Decides whether samples of a process's thread `task` are fair. Raises OSError if the system has no data."""

    def __init__(self, process: int, task: int, *, stays: bool = False) -> None:
        self.stays = stays  # this process stays on the thread's core from one sample to the next
        folder = f"/proc/{process}/task/{task}"
        self._files = [
            os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in ("schedstat", "status", "stat")
        ]
        self._own = os.open("/proc/thread-self/stat", os.O_RDONLY | os.O_CLOEXEC)
        self._arrivals = 0
        self._voluntary = -1  # the thread's voluntary context switches at the previous sample
        self._cores = os.sched_getaffinity(process)

    def begin(self) -> None:
        """A sample begins: the frames are copied, and the thread may go on."""
        if self.stays:
            self._move_to(self._cores)
        self._arrivals = int(os.pread(self._files[0], 128, 0).split()[2])

    def is_fair(self, late_s: float) -> bool:
        """Whether a sample counts that began `late_s` after it was due."""
        status = os.pread(self._files[1], 8192, 0)
        switches = {how: int(count) for how, count in _SWITCHES.findall(status)}
        before, self._voluntary = self._voluntary, switches.get(b"voluntary", -1)
        if self._arrivals > sum(switches.values()):
            return True
        elsewhere = self._is_elsewhere()
        state = _STATE.search(status)
        if state is None:
            return False
        in_time = late_s <= IN_TIME_S
        if state[1] == _READY:
            return before == self._voluntary >= 0 or (self.stays and in_time)
        return elsewhere or in_time

    def end(self) -> None:
        """The sample is over."""
        if self.stays:
            self._move_to({_core(self._files[2])})

    def _is_elsewhere(self) -> bool:
        """Whether the thread is on another core than this process; if not, this process leaves the core."""
        core = _core(self._files[2])
        if core != _core(self._own):
            return True
        if not self.stays:
            self._move_to(self._cores - {core})
        return False

    @staticmethod
    def _move_to(cores: set[int]) -> None:
        if cores:
            with suppress(OSError):
                os.sched_setaffinity(0, cores)

    def close(self) -> None:
        for file in (*self._files, self._own):
            with suppress(OSError):
                os.close(file)


def _core(file: int) -> int:
    return int(os.pread(file, 1024, 0).rpartition(b")")[2].split()[_CORE_FIELD])
