"""Samples the stack of a thread again and again: from another process, or where none can, from a thread of this one.

The trace names operators and calls, not the line that made them; torch's own `with_stack` costs many times as much and
can hang beside DataLoader workers. A thread of ours needs the GIL for each sample: it waits while the training thread
holds it in one long call, and then finds it at the line of that call, whose end it is. So each of its samples stands
for the time since the one before, and sees no loop of Python's own (`StackSamples.exact`).

Nothing here raises into a run. The other process needs Linux's file of a process's memory; where the system has none or
does not let it be read, or where the process does not start, a thread samples.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter, perf_counter_ns, thread_time_ns
from types import FrameType
from typing import Any, NamedTuple

from msgspec import Struct

from gpulab.capture.stack_reader import OWN_MEMORY, Layout, Spot, Stack, find_layout, thread_state
from gpulab.devices.own_processes import marked, python_command

PERIOD_S = 0.002
READY_S, ANSWER_S, END_S = 0.5, 3.0, 2.0


class ThreadSamples(Struct, frozen=True):
    """What was seen of one thread: when, and at which of the `stacks`, each from the innermost line outwards."""

    t_ns: Sequence[int]
    stack: Sequence[int]
    stacks: Sequence[tuple[Spot, ...]]
    began_ns: int
    holds_lock: Sequence[bool] = ()  # whether the thread ran Python; empty: unknown


@functools.cache
def own_layout() -> Layout | None:
    """How this Python keeps its frames; None where that cannot be told."""
    try:
        file = os.open(OWN_MEMORY, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return find_layout(file)
    finally:
        os.close(file)


class Channel:
    """How a process asks to be looked at: it is passed on to workers, however they are started."""

    def __init__(self, messages: socket.socket) -> None:
        self._messages = messages

    def sample(
        self,
        key: str,
        period_s: float = PERIOD_S,
        inside: tuple[str, str] | None = None,
        *,
        spares: bool = False,
        fills_cores: bool = False,
        most: int | None = None,
    ) -> bool:
        """Have the calling thread looked at from now on; whether that could be asked for."""
        thread = {"thread": thread_state(), "process": os.getpid(), "task": threading.get_native_id()}
        how = {"period_s": period_s, "inside": inside, "spares": spares, "fills_cores": fills_cores, "most": most}
        message = {"sample": key, **thread, **how}
        try:
            file = os.open(OWN_MEMORY, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            socket.send_fds(self._messages, [json.dumps(message).encode()], [file], socket.MSG_DONTWAIT)
        except OSError:
            return False
        finally:
            os.close(file)
        return True

    def rest(self, key: str) -> None:
        with suppress(OSError):
            self._messages.send(json.dumps({"rest": key}).encode(), socket.MSG_DONTWAIT)


class SamplingProcess:
    """One child process. `start` and `stop` belong to a run; `channel` is None while nothing can be looked at."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._messages: socket.socket | None = None
        self.channel: Channel | None = None
        self._buffer = b""
        self._answers: dict[str, dict[str, Any]] = {}
        self._ready = False

    def start(self) -> None:
        """Start the child and return at once."""
        layout = own_layout()
        if layout is None or not hasattr(socket, "SOCK_SEQPACKET"):
            return
        ours, childs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") or k == "PYTHONHOME"}
            self._process = subprocess.Popen(
                python_command("gpulab.capture.stack_process:main", childs.fileno(), layout._asdict(), os.getpid()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=marked(environment),
                pass_fds=[childs.fileno()],
                start_new_session=True,  # an interrupt goes to the whole group of the notebook; we must outlive it
            )
        except (OSError, ValueError, subprocess.SubprocessError):
            ours.close()
            return
        finally:
            childs.close()
        self._messages, self.channel = ours, Channel(ours)

    def wait_until_ready(self) -> None:
        """The child needs some time to start; what it is asked before that, it does then."""
        deadline_s = perf_counter() + READY_S
        while self.channel is not None and not self._ready and self._read_until(deadline_s):
            pass

    def samples(self, key: str) -> ThreadSamples | None:
        """What was seen of a thread that rests now; None where nothing is known of it."""
        deadline_s = perf_counter() + ANSWER_S
        while key not in self._answers and self._read_until(deadline_s):
            pass
        answer = self._answers.pop(key, {})
        if "t_ns" not in answer:
            return None
        lines = [(str(file), int(line), str(function)) for file, line, function in answer["lines"]]
        stacks = [tuple(lines[i] for i in stack) for stack in answer["stacks"]]
        return ThreadSamples(answer["t_ns"], answer["stack"], stacks, answer["began_ns"], answer["holds_lock"])

    def stop(self) -> None:
        """End the child, close every pipe. May be called twice."""
        process, self._process, self.channel = self._process, None, None
        if self._messages is not None:
            self._messages.close()
            self._messages = None
        if process is None or process.stdin is None or process.stdout is None:
            return
        with suppress(OSError):  # workers may hold the pipe open, so its end would not be seen
            process.stdin.write(b".")
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdin.close()
            process.stdout.close()

    def _read_until(self, deadline_s: float) -> bool:
        """Take what the child has said; whether there may be more."""
        out = self._process.stdout if self._process is not None else None
        if out is None:
            return False
        readable, _, _ = select.select([out], [], [], max(deadline_s - perf_counter(), 0.0))
        data = os.read(out.fileno(), 1 << 20) if readable else b""
        *whole, self._buffer = (self._buffer + data).split(b"\n")
        for line in whole:
            self._take(line)
        return bool(data)

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return
        self._ready |= "ready" in message
        if "rested" in message:
            self._answers[message["rested"]] = message


LONGEST_PERIOD_S = 0.05
DEAREST = 0.03  # share of the time that this thread may compute: where a look costs more it looks less often
_JUDGED_AFTER = 4  # looks: what they cost is known then


class Pace(NamedTuple):
    """How often to look, and how many times at most."""

    period_s: float
    most: int | None = None


TRACED = Pace(PERIOD_S)
TRACED_WITHIN = Pace(PERIOD_S, 20_000)


class ThreadSampler:
    """A thread that looks at the one that calls `start` until `stop`."""

    def __init__(self, pace: Pace = TRACED_WITHIN) -> None:
        self._pace = pace
        self._going = threading.Lock()  # held while it is to go on: waiting for it is the cheapest sleep there is
        self._thread: threading.Thread | None = None
        self._times: list[int] = []
        self._numbers: list[int] = []
        self._stacks: dict[Stack, int] = {}
        self._spots: dict[Spot, Spot] = {}  # each once: stacks have most in common
        self._began_ns = 0

    def start(self) -> None:
        """Begin to look. Where no thread can be started nothing is seen."""
        self._began_ns = perf_counter_ns()
        self._going.acquire()
        sampled = threading.get_ident()
        thread = threading.Thread(target=self._sample, args=(sampled,), name="gpulab-lines", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return
        self._thread = thread

    def stop(self) -> None:
        """Look no more, leave no thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._going.release()
            thread.join()

    @property
    def samples(self) -> ThreadSamples:
        """So far. From any thread."""
        count = len(self._numbers)
        return ThreadSamples(self._times[:count], self._numbers[:count], list(self._stacks), self._began_ns)

    def _sample(self, thread: int) -> None:
        frames, clock, over = sys._current_frames, perf_counter_ns, self._going.acquire
        times, numbers, stacks = self._times, self._numbers, self._stacks
        period_s, most, spent_ns = self._pace.period_s, self._pace.most or sys.maxsize, thread_time_ns()
        cost_ns: list[int] = []
        while not over(timeout=period_s) and len(times) < most:
            collects = gc.isenabled()
            gc.disable()  # a collection inside `_current_frames` blocks the whole process (cpython#106883)
            try:
                stack = whole_stack(frames().get(thread))
            finally:
                if collects:
                    gc.enable()
            number = stacks.get(stack)
            if number is None:
                number = stacks[tuple(self._spots.setdefault(spot, spot) for spot in stack)] = len(stacks)
            times.append(clock())
            numbers.append(number)
            before_ns, spent_ns = spent_ns, thread_time_ns()
            cost_ns.append(spent_ns - before_ns)
            if len(cost_ns) == _JUDGED_AFTER:
                # files that are met for the first time cost a look many times what it costs from then on
                affordable_s = sorted(cost_ns)[_JUDGED_AFTER // 2 - 1] / 1e9 / DEAREST
                period_s = min(max(self._pace.period_s, affordable_s), LONGEST_PERIOD_S)
                cost_ns.clear()


def whole_stack(frame: FrameType | None) -> Stack:
    """All lines from this frame outwards, as another process would read them."""
    spots: list[Spot] = []
    while frame is not None:
        code = frame.f_code
        spots.append((code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_qualname))
        frame = frame.f_back
    return tuple(spots)


class StackSampler:
    """Looks at the thread that calls `start`: another process does at the pace `outside`, else a thread of ours."""

    def __init__(
        self,
        process: SamplingProcess | None,
        name: str,
        outside: Pace = TRACED,
        within: Pace = TRACED_WITHIN,
        *,
        on_cpu: bool = False,
    ) -> None:
        self._process, self._key = process, f"{name} {perf_counter_ns()}"
        self._on_cpu = on_cpu  # it computes there, so that operators may take all cores
        self._outside, self._within = outside, within
        self._sampler: ThreadSampler | None = None
        self._samples: ThreadSamples | None = None

    def start(self, *, at_once: bool = False) -> None:
        """Begin to look; `at_once`: return when somebody does."""
        channel = self._process.channel if self._process is not None else None
        fills = self._on_cpu and _fills_cores()
        pace = self._outside
        if channel is None or not channel.sample(self._key, pace.period_s, fills_cores=fills, most=pace.most):
            self._sampler = ThreadSampler(self._within)
            self._sampler.start()
        elif at_once and self._process is not None:
            self._process.wait_until_ready()

    def stop(self) -> None:
        """Look no more."""
        if self._sampler is not None:
            self._sampler.stop()
        elif self._process is not None and self._process.channel is not None:
            self._process.channel.rest(self._key)

    @property
    def is_exact(self) -> bool:
        """Whether another process has looked: what the thread did could not sway it."""
        return self._sampler is None

    @property
    def samples(self) -> ThreadSamples | None:
        """What was seen, once sampling has stopped and before the process has; None where nothing is known."""
        if self._sampler is not None:
            return self._sampler.samples
        if self._samples is None and self._process is not None:
            self._samples = self._process.samples(self._key)
        return self._samples


def _fills_cores() -> bool:
    """Whether PyTorch's operators run on all cores that this process may use."""
    from gpulab.devices.machine import usable_cores

    torch = sys.modules.get("torch")
    return torch is not None and torch.get_num_threads() >= usable_cores()
