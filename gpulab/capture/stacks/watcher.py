"""The parent's side of the process that looks at stacks: starts it, says whom to look at, hands over what was seen.

Nothing here raises into a run: where the system does not let memory be read, or the child does not start, nothing is
seen. Linux only; elsewhere there is no such file of a process's memory.
"""

from __future__ import annotations

import functools
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

from msgspec import Struct

from gpulab.capture.stacks.stack import OWN_MEMORY, Layout, Spot, find_layout, thread_state
from gpulab.devices.own_processes import import_path, marked

PERIOD_S = 0.002
READY_S, ANSWER_S, END_S = 0.5, 3.0, 2.0

BOOTSTRAP = """
import json, sys
messages, layout, parent, sys.path[:] = *map(json.loads, sys.argv[1:4]), json.loads(sys.argv[4])
from gpulab.capture.stacks.stack import Layout
from gpulab.capture.stacks.process import main
main(messages, Layout.of(layout), parent)
"""


class Looks(Struct, frozen=True):
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

    def watch(
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
        message = {"watch": key, **thread, **how}
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


class StackWatcher:
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
            arguments = [childs.fileno(), layout._asdict(), os.getpid(), import_path()]
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-P", "-c", BOOTSTRAP, *map(json.dumps, arguments)],
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

    def looks(self, key: str) -> Looks | None:
        """What was seen of a thread that rests now; None where nothing is known of it."""
        deadline_s = perf_counter() + ANSWER_S
        while key not in self._answers and self._read_until(deadline_s):
            pass
        answer = self._answers.pop(key, {})
        if "t_ns" not in answer:
            return None
        lines = [(str(file), int(line), str(function)) for file, line, function in answer["lines"]]
        stacks = [tuple(lines[i] for i in stack) for stack in answer["stacks"]]
        return Looks(answer["t_ns"], answer["stack"], stacks, answer["began_ns"], answer["holds_lock"])

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
