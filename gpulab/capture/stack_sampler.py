"""Samples the stack of a thread: from another process or, if that is impossible, from a thread of this one.

The trace names operators and calls, but not the lines that made them; torch's own `with_stack` costs many times as much
and can hang with DataLoader workers. A sampling thread of this process needs the GIL: while the training thread holds
the GIL in a long call, the sample waits, and finds the line of that call at its end. So each such sample represents the
time since the previous one, and none falls within a loop of pure Python (`StackSamples.exact`).

Nothing here raises into a run. The other process needs Linux's file of a process's memory. If the system has no such
file or denies access, or if the process does not start, a thread samples.
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
from gpulab.devices.own_processes import ending, start_child

PERIOD_S = 0.002
READY_S, ANSWER_S, END_S = 0.5, 3.0, 2.0


class ThreadSamples(Struct, frozen=True):
    """The samples of one thread: when, and which of the `stacks`, each from the innermost line outwards."""

    t_ns: Sequence[int]
    stack: Sequence[int]
    stacks: Sequence[tuple[Spot, ...]]
    began_ns: int
    holds_lock: Sequence[bool] = ()  # whether the thread ran Python; empty: unknown


@functools.cache
def own_layout() -> Layout | None:
    """Where this Python stores its frames; None if unknown."""
    try:
        file = os.open(OWN_MEMORY, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return find_layout(file)
    finally:
        os.close(file)


class Channel:
    """Sends a process's requests for samples of its threads; workers inherit it, however they are started."""

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
        """Have the calling thread sampled from now on; False if the request could not be sent."""
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

    def stop(self, key: str) -> None:
        """Stop sampling that thread."""
        with suppress(OSError):
            self._messages.send(json.dumps({"stop": key}).encode(), socket.MSG_DONTWAIT)


class SamplingProcess:
    """The child process that samples stacks during one run; `channel` is None while nothing can be sampled."""

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
            arguments = childs.fileno(), layout._asdict(), os.getpid()
            self._process = start_child("gpulab.capture.stack_process:main", *arguments, pass_fds=[childs.fileno()])
        except (OSError, ValueError, subprocess.SubprocessError):
            ours.close()
            return
        finally:
            childs.close()
        self._messages, self.channel = ours, Channel(ours)

    def wait_until_ready(self) -> None:
        """Wait for the child's start, at most `READY_S`. It carries out earlier requests as soon as it runs."""
        deadline_s = perf_counter() + READY_S
        while self.channel is not None and not self._ready and self._read_until(deadline_s):
            pass

    def samples(self, key: str) -> ThreadSamples | None:
        """The samples of a thread whose sampling was stopped; None if there are none."""
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
        if process is None or process.stdout is None:
            return
        with ending(process), suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.stdout.close()

    def _read_until(self, deadline_s: float) -> bool:
        """Receive what the child has written; False if nothing more is to come in time."""
        out = self._process.stdout if self._process is not None else None
        if out is None:
            return False
        readable, _, _ = select.select([out], [], [], max(deadline_s - perf_counter(), 0.0))
        data = os.read(out.fileno(), 1 << 20) if readable else b""
        *whole, self._buffer = (self._buffer + data).split(b"\n")
        for line in whole:
            self._receive(line)
        return bool(data)

    def _receive(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return
        self._ready |= "ready" in message
        if "stopped" in message:
            self._answers[message["stopped"]] = message


LONGEST_PERIOD_S = 0.05
SHARE = 0.03  # of the time, at most, that this thread computes: if a sample costs more, fewer are taken
_COST_SAMPLES = 4  # samples after which the cost of one is estimated


class Pace(NamedTuple):
    """How often to sample, and how many samples to keep at most."""

    period_s: float
    most: int | None = None


TRACED = Pace(PERIOD_S)
TRACED_WITHIN = Pace(PERIOD_S, 20_000)


class ThreadSampler:
    """A thread that samples the one that calls `start`, until `stop`."""

    def __init__(self, pace: Pace = TRACED_WITHIN) -> None:
        self._pace = pace
        self._going = threading.Lock()  # locked during sampling: waiting for a lock is the cheapest sleep
        self._thread: threading.Thread | None = None
        self._times: list[int] = []
        self._numbers: list[int] = []
        self._stacks: dict[Stack, int] = {}
        self._spots: dict[Spot, Spot] = {}  # one object per line: stacks share most of their lines
        self._began_ns = 0

    def start(self) -> None:
        """Begin to sample. If no thread can be started, there will be no samples."""
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
        """End the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._going.release()
            thread.join()

    @property
    def samples(self) -> ThreadSamples:
        """The samples so far. May be called from any thread."""
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
            if len(cost_ns) == _COST_SAMPLES:
                # the first sample in a file costs many times as much as later ones: hence the lower median
                affordable_s = sorted(cost_ns)[_COST_SAMPLES // 2 - 1] / 1e9 / SHARE
                period_s = min(max(self._pace.period_s, affordable_s), LONGEST_PERIOD_S)
                cost_ns.clear()


def whole_stack(frame: FrameType | None) -> Stack:
    """All lines from this frame outwards, as the sampling process would read them."""
    spots: list[Spot] = []
    while frame is not None:
        code = frame.f_code
        spots.append((code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_qualname))
        frame = frame.f_back
    return tuple(spots)


class StackSampler:
    """Samples the thread that calls `start`: from the sampling process at the pace `outside`, else from a thread."""

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
        self._on_cpu = on_cpu  # the training computes on the CPU, so that operators may take all cores
        self._outside, self._within = outside, within
        self._sampler: ThreadSampler | None = None
        self._samples: ThreadSamples | None = None

    def start(self, *, at_once: bool = False) -> None:
        """Begin to sample; `at_once`: return only when sampling has begun."""
        channel = self._process.channel if self._process is not None else None
        fills = self._on_cpu and _fills_cores()
        pace = self._outside
        if channel is None or not channel.sample(self._key, pace.period_s, fills_cores=fills, most=pace.most):
            self._sampler = ThreadSampler(self._within)
            self._sampler.start()
        elif at_once and self._process is not None:
            self._process.wait_until_ready()

    def stop(self) -> None:
        """End sampling."""
        if self._sampler is not None:
            self._sampler.stop()
        elif self._process is not None and self._process.channel is not None:
            self._process.channel.stop(self._key)

    @property
    def is_exact(self) -> bool:
        """Whether another process sampled, so that the thread's own work did not decide when."""
        return self._sampler is None

    @property
    def samples(self) -> ThreadSamples | None:
        """The samples, after `stop` and before the process ends; None if there are none."""
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
