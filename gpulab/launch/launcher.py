"""PyTorch's own launcher, torchrun, for N ranks on this machine: its command, its processes, and their output.

Source: PyTorch, "torchrun (Elastic Launch)". It hands the ranks' variables to each process, ends all others where one
fails, and passes a SIGTERM on to them; where they are still there half a minute later, it kills them.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from msgspec import Struct

from gpulab.devices.machine import usable_cores
from gpulab.formatting import plural

THREADS = "OMP_NUM_THREADS"
OF_THE_KERNEL = ("JPY_PARENT_PID", "JPY_SESSION_NAME", "MPLBACKEND")  # variables that would mislead a plain Python
PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
LATEST_S = 0.1  # a line is handed on that soon
_RANK = re.compile(r"\[default(\d+)\]:")
# Who dies takes its ranks along: Linux sends SIGTERM to a child whose parent has ended (prctl, 1).
_ORPHANS_END = """
import ctypes, os, sys
try:
    ctypes.CDLL(None, use_errno=True).prctl(1, 15, 0, 0, 0)
except (AttributeError, OSError):
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit(143)
os.execv(sys.argv[2], sys.argv[2:])
"""


def launcher_words(ranks: int, job_id: str = "") -> list[str]:
    """The beginning of a command line that starts so many ranks; what each runs follows ("-m", "module", …).

    With `job_id` the job has that name, else one of the launcher's making.
    """
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", job_id)
    where = ["--nnodes", "1", *meeting] if job_id else ["--standalone"]
    return [*agent_words(), *where, "--nproc-per-node", str(ranks)]


def agent_words() -> list[str]:
    """torchrun, of this Python."""
    return [sys.executable, "-m", "torch.distributed.run"]


def prefix_template() -> str:
    """What torchrun puts before a line of a rank: its number among all, not only on its node; see `line_of`."""
    return "[default${rank}]:"


def threads_of_each(ranks: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """How many threads each rank computes with: its part of the cores; without it torchrun takes one, and warns."""
    return {THREADS: environment.get(THREADS) or str(max(1, _cores() // ranks))}


def shortage(ranks: int) -> str:
    """A sentence where there are more ranks than processor cores; empty where there are not."""
    cores = _cores()
    return f"{plural(ranks, 'rank')} share {plural(cores, 'processor core')}." if ranks > cores else ""


def _cores() -> int:
    return max(1, math.floor(usable_cores()))


class Line(Struct, frozen=True):
    """One line of output; `rank` is None for the launcher's own words."""

    rank: int | None
    text: str
    is_error: bool


class RankProcesses:
    """The ranks of one command. Make it, read `lines`, and `end` it: then nothing of it is left."""

    status_words = ""  # it waits in no queue
    may_go_on = False

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], logs: Path) -> None:
        """`words` is the whole command, `logs` a folder for what the ranks print, which is read from there.

        Raises OSError where the process cannot be started.
        """
        first, *rest = words
        place = rest.index("torch.distributed.run") + 1
        tee = ["--tee", "3", "--log-dir", str(logs)]
        command = [first, *rest[:place], *tee, *rest[place:]]
        self._process = subprocess.Popen(
            ended_with_this_process(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment, "PYTHONUNBUFFERED": "1", PREFIX_VARIABLE: prefix_template()},
            start_new_session=True,
        )
        self._lines: queue.Queue[Line | None] = queue.Queue()
        self._readers = [
            threading.Thread(target=self._read, args=(stream, is_error), name="gpulab-rank-output", daemon=True)
            for stream, is_error in ((self._process.stdout, False), (self._process.stderr, True))
        ]
        for reader in self._readers:
            reader.start()

    def lines(self) -> Iterator[Line | None]:
        """What is printed, as it comes, until all have ended; None where nothing came for a moment."""
        ended = 0
        while ended < len(self._readers):
            try:
                line = self._lines.get(timeout=LATEST_S)
            except queue.Empty:
                yield None
                continue
            if line is None:
                ended += 1
            else:
                yield line

    def stop(self) -> None:
        """Ask all ranks to end at their next step."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all of them at once, with what they have started: each rank has a process group of its own."""
        from gpulab.devices.host import children_of

        groups = {self._process.pid}
        for pid in children_of(self._process.pid) or ():
            with contextlib.suppress(ProcessLookupError):
                groups.add(os.getpgid(pid))
        for group in groups - {os.getpgid(0)}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)

    def end(self) -> int:
        """Wait for the launcher to be gone. Returns its exit status."""
        status = self._process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        return status

    def _read(self, stream: IO[bytes] | None, is_error: bool) -> None:
        assert stream is not None
        with contextlib.suppress(ValueError, OSError):  # closed
            for raw in stream:
                self._lines.put(line_of(raw.decode("utf-8", "replace").rstrip("\n"), is_error=is_error))
        self._lines.put(None)


def ended_with_this_process(command: Sequence[str]) -> list[str]:
    """The same command, which is sent SIGTERM when this process has ended in whatever way (Linux, prctl)."""
    return [sys.executable, "-I", "-S", "-c", _ORPHANS_END, str(os.getpid()), *command]


def end_with_launcher() -> None:
    """Let the system send this process, a rank, SIGTERM when its launcher has ended in whatever way (Linux, prctl)."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None, use_errno=True).prctl(1, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() == 1:  # it has ended already
        os.kill(os.getpid(), signal.SIGTERM)


def line_of(text: str, *, is_error: bool) -> Line:
    """Whose line it is: torchrun puts "[default1]:" before those of rank 1."""
    match = _RANK.match(text)
    return Line(int(match[1]), text[match.end() :], is_error) if match else Line(None, text, is_error)


def record_words(options: Mapping[str, object], target: Sequence[str]) -> list[str]:
    """What each rank runs: `gpulab record` with these options (None, False and "" are left out) on a script.

    An option whose value is a list is given once for each of its words.
    """
    words = ["-m", "gpulab", "record"]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, list):
            words += [word for one in value for word in (flag, str(one))]
        elif value is not None and value is not False and value != "":
            words += [flag, str(value)]
    return [*words, *target]
