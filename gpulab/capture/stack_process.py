"""The child process that samples stacks, started by `stack_sampler`; it imports neither NumPy nor torch.

Whoever is to be looked at, the training process or a worker of its DataLoader, sends a message on one socket, with a
file of its own memory beside it: so no right over another process is needed. One JSON object each:

    {"sample": key, "thread": address, "process": number, "task": number, "period_s": s,
     "inside": null | [end of a file's name, end of a function's], "spares": whether it is loading, which goes on,
     "fills_cores": whether its operators use all cores, "most": looks that are kept, null for many}
    {"rest": key}                                          look no more, and tell what was seen

On its output the child writes one JSON object a line:

    {"ready": true}                                        once, first
    {"rested": key, "t_ns": [time, …], "stack": [number, …], "holds_lock": [whether it runs Python, …],
     "stacks": [[number, …], …], "lines": [[file, line, function], …], "began_ns": time}

`inside`: only what is called from that function counts. `most`: of a whole run, whose looks are nowhere denser.
Times are of `time.perf_counter_ns`, one clock for all processes of a machine. It ends at the end of its input, and with
its parent.
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
DEAREST = 0.05  # share of one core that looking may take: where a look costs more, it looks less often
STAYING = 0.02  # the same where it stops the thread: each look costs that several times its own time (caches, waits)
SPARING = 0.003  # the same of loading, which goes on all the time, after its first looks
EAGER_LOOKS, MOST_EAGER = 60, 2_000  # so many fair ones, of at most so many
SOON_PERIOD_S, SOON_LOOKS = 0.001, 200  # a profiled window or a whole run may be short: its first looks, fair or not
DEAREST_SOON = 0.3  # share of one core that they may take
MOST_LOOKS = 20_000  # of one thread; each time so many are reached, half of them are dropped and it looks half as often
RETRIES = 16  # where a stack cannot be read: of one of quick deep Python every second cannot
LONGEST_S = 1.0  # between two looks after the parent
_STARTING_COST_S = 1e-4
_COSTS = 9  # looks: one costs the median of so many, for the first at a function reads its table of lines


class _Thread:
    """One thread, and what was seen of it. No dataclass: importing them takes as long as a hundred looks."""

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
        self.most, self.is_even = most or MOST_LOOKS, most is not None
        self.due_s, self.began_ns = perf_counter(), perf_counter_ns()
        self.t_ns: list[int] = []
        self.stacks: list[int] = []
        self.holds_lock: list[bool | None] = []
        self.numbers: dict[tuple[Spot, ...], int] = {}
        self.uncounted = 0  # looks at a time that was not asked about, or at which nobody can tell (`on_core`)
        self._ends: tuple[str | int, ...] | None = None  # file and function, at which each whole stack of a thread ends

    @property
    def is_known(self) -> bool:
        """Whether the first looks were enough."""
        return len(self.t_ns) >= EAGER_LOOKS or self.sample_count >= MOST_EAGER

    @property
    def sample_count(self) -> int:
        """All of them, also those that do not count."""
        return len(self.t_ns) + self.uncounted

    def sample(self) -> None:
        """First of all the thread's frames: we take a core that its operators may soon wait for, and then it stands
        there.
        """
        self.reader.take()
        now_ns, holds_lock = perf_counter_ns(), self.reader.holds_lock()
        late_s = now_ns / 1e9 - self.due_s
        self.core.begin()
        try:
            lines = self._read()
            fair = lines is not None and self.core.is_fair(late_s)
        finally:
            self.core.end()
        # of a share of all time, waiting at a line is a part
        if lines is None or not (fair or (self.is_even and late_s <= IN_TIME_S)):
            self.uncounted += 1
            return
        self.t_ns.append(now_ns)
        self.stacks.append(self.numbers.setdefault(lines, len(self.numbers)))
        self.holds_lock.append(holds_lock)
        if len(self.t_ns) >= self.most:
            self.t_ns, self.stacks, self.holds_lock = self.t_ns[::2], self.stacks[::2], self.holds_lock[::2]
            self.period_s *= 2

    def close(self) -> None:
        """Look no more."""
        self.core.close()
        os.close(self.file)

    def _read(self) -> tuple[Spot, ...] | None:
        """Read again where the thread went on meanwhile: code that calls much must not be seen less often for that."""
        for _ in range(RETRIES):
            with suppress(Unreadable):
                lines = self._lines()
                if self.inside is not None or (lines and lines[-1][::2] == self._ends):
                    return lines
        lines = self._lines()
        self._ends = lines[-1][::2] if lines else None
        return lines

    def _lines(self) -> tuple[Spot, ...] | None:
        """The stack as far as it is asked about; None where the thread is elsewhere."""
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
            "rested": key,
            "t_ns": self.t_ns,
            "stack": self.stacks,
            "holds_lock": [] if None in self.holds_lock else self.holds_lock,
            "stacks": stacks,
            "lines": list(numbers),
            "began_ns": self.began_ns,
        }


class Sampling:
    """Of all threads that asked for it, until the parent is gone."""

    def __init__(self, messages: socket.socket, layout: Layout, parent_pid: int, *, is_prompt: bool = False) -> None:
        self._messages, self._layout, self._parent_pid = messages, layout, parent_pid
        self._threads: dict[str, _Thread] = {}
        self._costs_s = deque([_STARTING_COST_S] * _COSTS, maxlen=_COSTS)
        self._cost_s = _STARTING_COST_S
        self._is_prompt = is_prompt

    def run(self) -> None:
        """Look and answer until the input ends."""
        _tell({"ready": True})
        while os.getppid() == self._parent_pid:
            due_s = min((w.due_s for w in self._threads.values()), default=perf_counter() + LONGEST_S)
            timeout_s = min(max(due_s - perf_counter(), 0.0), LONGEST_S)
            readable = select.select([self._messages.fileno(), 0], [], [], timeout_s)[0]
            if 0 in readable:
                return
            if readable:
                self._take()
            self._sample_due()

    def _sample_due(self) -> None:
        began_s = perf_counter()
        due = [(key, w) for key, w in self._threads.items() if w.due_s <= began_s]
        spent_s = thread_time()
        for key, watched in due:
            try:
                watched.sample()
            except Unreadable:
                self._drop_if_gone(key)
            except (OSError, ValueError, IndexError):  # it has ended
                watched.due_s = float("inf")
        if due:
            self._costs_s.append((thread_time() - spent_s) / len(due))
            self._cost_s = sorted(self._costs_s)[_COSTS // 2]
        for _, watched in due:
            if watched.due_s < float("inf"):
                watched.due_s = perf_counter() + self._pause_s(watched) * uniform(0.5, 1.5)  # loops have a beat too

    def _pause_s(self, watched: _Thread) -> float:
        """To the next look, on average."""
        if watched.sample_count < SOON_LOOKS and not watched.is_even:
            return max(SOON_PERIOD_S, self._cost_s * len(self._threads) / DEAREST_SOON)
        sparing = sum(watched.spares for watched in self._threads.values())
        spares = watched.spares and watched.is_known
        share = SPARING / sparing if spares else DEAREST / len(self._threads)
        if watched.is_even and watched.core.stays:
            share = min(share, STAYING)
        return max(watched.period_s, self._cost_s / share)

    def _drop_if_gone(self, key: str) -> None:
        """A process that has ended has no memory, though its file is open."""
        watched = self._threads[key]
        with suppress(OSError):
            if os.pread(watched.file, 8, watched.reader.thread):
                return
        watched.due_s = float("inf")

    def _take(self) -> None:
        data, files, _, _ = socket.recv_fds(self._messages, MESSAGE_BYTES, 1)
        try:
            message = json.loads(data)
        except ValueError:
            message = {}
        if "sample" in message and files:
            self._add(message, files.pop())
        elif "rest" in message:
            self._rest(message["rest"])
        for file in files:
            os.close(file)

    def _add(self, message: dict[str, object], file: int) -> None:
        key, thread, inside = str(message["sample"]), message["thread"], message.get("inside")
        process, task = message["process"], message["task"]
        assert isinstance(thread, int) and isinstance(process, int) and isinstance(task, int)
        if key in self._threads:
            self._threads.pop(key).close()
        try:
            core = OnCore(process, task, stays=self._is_prompt and message.get("fills_cores") is True)
        except OSError:
            os.close(file)
            return
        self._threads[key] = _Thread(
            reader=StackReader(file, self._layout, thread),
            core=core,
            file=file,
            period_s=float(str(message["period_s"])),
            spares=bool(message["spares"]),
            inside=(str(inside[0]), str(inside[1])) if isinstance(inside, list) else None,
            most=most if isinstance(most := message.get("most"), int) else None,
        )

    def _rest(self, key: str) -> None:
        watched = self._threads.pop(key, None)
        if watched is not None:
            watched.close()
        _tell(watched.answer(key) if watched is not None else {"rested": key})


def main(messages: int, layout: dict[str, Any], parent_pid: int) -> None:
    """Look at whoever asks for it on that socket; `layout` are the fields of a `Layout`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal means the training, not us
    with socket.socket(fileno=messages) as asked, suppress(BrokenPipeError):
        Sampling(asked, Layout.of(layout), parent_pid, is_prompt=becomes_prompt()).run()


def becomes_prompt() -> bool:
    """Whether this process from now on runs at once when it wakes, though others have work for its core.

    Linux's scheduler lets who asks for a shorter slice go first (EEVDF, `PREEMPT_SHORT`, since 6.12).
    """
    number = _SET_ATTRIBUTES.get(os.uname().machine)
    release = tuple(int(n) for n in re.findall(r"\d+", os.uname().release)[:2])
    if number is None or release < _SHORT_SLICES_SINCE:
        return False
    import ctypes

    asked = struct.pack("IIQiIQQQ", 48, 0, 0, 0, 0, _SLICE_NS, 0, 0)  # struct sched_attr, version 0
    return bool(ctypes.CDLL(None).syscall(number, 0, asked, 0) == 0)


def _tell(message: dict[str, object]) -> None:
    line = (json.dumps(message) + "\n").encode()
    while line:
        line = line[os.write(1, line) :]


# Whether a look at a thread is a fair draw of its time: not where the looker had to wait until the thread stood still,
# nor where the thread stood still because it waited for the core on which the looker runs. Compute threads that fill
# all cores do: then the looker takes the core of the thread itself, which stops at the line where it is.


_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}  # sched_setattr, Linux
_SHORT_SLICES_SINCE, _SLICE_NS = (6, 12), 100_000  # the shortest there is
IN_TIME_S = 0.0005  # after it was due: so soon no look has waited for anybody
_SWITCHES = re.compile(rb"^(nonvoluntary|voluntary)_ctxt_switches:\s*(\d+)", re.MULTILINE)
_STATE = re.compile(rb"^State:\s*(\w)", re.MULTILINE)
_READY = b"R"
_CORE_FIELD = 36  # of stat, after the name


class OnCore:
    """Of one thread, `task`, of a process. Raises OSError where the system does not tell."""

    def __init__(self, process: int, task: int, *, stays: bool = False) -> None:
        self.stays = stays  # on its core, from one look to the next
        folder = f"/proc/{process}/task/{task}"
        self._files = [
            os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in ("schedstat", "status", "stat")
        ]
        self._own = os.open("/proc/thread-self/stat", os.O_RDONLY | os.O_CLOEXEC)
        self._arrivals = 0
        self._left = -1  # how often it had left a core by itself, at the look before
        self._cores = os.sched_getaffinity(process)

    def begin(self) -> None:
        """A look has begun: the frames are taken, and the thread may go on."""
        if self.stays:
            self._move_to(self._cores)
        self._arrivals = int(os.pread(self._files[0], 128, 0).split()[2])

    def is_fair(self, late_s: float) -> bool:
        """The look is over; it began so much after it was due."""
        status = os.pread(self._files[1], 8192, 0)
        switches = {how: int(count) for how, count in _SWITCHES.findall(status)}
        before, self._left = self._left, switches.get(b"voluntary", -1)
        if self._arrivals > sum(switches.values()):
            return True
        elsewhere = self._is_elsewhere()
        state = _STATE.search(status)
        if state is None:
            return False
        in_time = late_s <= IN_TIME_S
        if state[1] == _READY:
            return before == self._left >= 0 or (self.stays and in_time)
        return elsewhere or in_time

    def end(self) -> None:
        """The look is over."""
        if self.stays:
            self._move_to({_core(self._files[2])})

    def _is_elsewhere(self) -> bool:
        """Whether the thread's core is another one than ours; else leave it."""
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
