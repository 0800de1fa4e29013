"""PyTorch's own launcher, torchrun, for N ranks on this machine: its command, its processes, and their output.

Source: PyTorch, "torchrun (Elastic Launch)". It sets the ranks' variables in each process, ends all ranks if one fails,
and forwards SIGTERM to them; ranks that are still alive half a minute later are killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from gpulab.devices.machine import usable_cores
from gpulab.formatting import plural

THREADS = "OMP_NUM_THREADS"
OF_THE_KERNEL = ("JPY_PARENT_PID", "JPY_SESSION_NAME", "MPLBACKEND")  # variables that would mislead a plain Python
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
RECORD = ("-m", "gpulab", "record")  # what each rank runs, with `option_words`
PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
PREFIX_TEMPLATE = "[default${rank}]:"  # prefix of a rank's lines, with the global rank; see `line_of`
LATEST_S = 0.1  # between two reads of the output
_RANK = re.compile(r"\[default(\d+)\]:")
# Ranks end with this process: Linux sends SIGTERM to a child whose parent has ended (prctl, 1).
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


def launcher_words(ranks: int, job_id: str, logs: Path | None = None) -> list[str]:
    """The beginning of a command line that starts `ranks` ranks; the words for each rank follow ("-m", "module", …).

    The job has the name `job_id`. The ranks' output goes to the folder `logs`, else to the terminal.
    """
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", job_id)
    output = ("--redirects", "3", "--log-dir", str(logs)) if logs is not None else ()
    return [*TORCHRUN, *output, "--nnodes", "1", *meeting, "--nproc-per-node", str(ranks)]


def threads_of_each(ranks: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Compute threads of each rank: its share of the cores. Without this variable torchrun sets one, with a warning."""
    return {THREADS: environment.get(THREADS) or str(max(1, _cores() // ranks))}


def shortage(ranks: int) -> str:
    """A sentence if there are more ranks than processor cores; else empty."""
    cores = _cores()
    return f"{plural(ranks, 'rank')} share {plural(cores, 'CPU core')}." if ranks > cores else ""


def _cores() -> int:
    return max(1, math.floor(usable_cores()))


class RankProcesses:
    """The ranks of one command. Create it, read `lines`, then call `end`, which leaves no process."""

    status_words = ""  # no queue
    may_go_on = False

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], logs: Path) -> None:
        """`words`: the whole command; `logs`: the folder from which the ranks' output is read.

        Raises OSError if the process cannot be started.
        """
        self._logs = logs
        paths: dict[Path, tuple[int | None, bool]] = {
            logs / "launcher.out": (None, False),
            logs / "launcher.err": (None, True),
        }
        self._files = {GrowingFile(path): whose for path, whose in paths.items()}
        with contextlib.ExitStack() as opened:
            out, error = (opened.enter_context(path.open("wb")) for path in paths)
            self._process = subprocess.Popen(
                ended_with_this_process(words),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=error,
                env={**environment, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def lines(self) -> Iterator[Line | None]:
        """The output as it arrives, until all ranks have ended; None after each read."""
        is_over = False
        while not is_over:
            is_over = self._process.poll() is not None  # polled before the read: nothing comes after it
            self._find_files()
            for file, whose in self._files.items():
                yield from (Line(whose[0], text, whose[1]) for text in file.lines())
            yield None
            if not is_over:
                time.sleep(LATEST_S)
        for file, whose in self._files.items():
            yield from (Line(whose[0], text, whose[1]) for text in file.rest())

    def stop(self) -> None:
        """Ask all ranks to end at their next step."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all ranks at once, with their children: each rank has its own process group."""
        from gpulab.devices.meters import children_of

        groups = {self._process.pid}
        for pid in children_of(self._process.pid) or ():
            with contextlib.suppress(ProcessLookupError):
                groups.add(os.getpgid(pid))
        for group in groups - {os.getpgid(0)}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)

    def end(self) -> int:
        """Wait until the launcher has ended. Returns its exit status."""
        return self._process.wait()

    def _find_files(self) -> None:
        """Find the output files: torchrun writes FOLDER/JOB/attempt_0/RANK/stdout.log, and stderr.log."""
        have = {file.path for file in self._files}
        for path in sorted(self._logs.glob("*/attempt_*/*/std*.log")):
            if path not in have and path.parent.name.isdecimal():
                self._files[GrowingFile(path)] = (int(path.parent.name), path.stem == "stderr")


def ended_with_this_process(command: Sequence[str]) -> list[str]:
    """The command, wrapped so that it gets SIGTERM when this process ends in any way (Linux, prctl)."""
    return [sys.executable, "-I", "-S", "-c", _ORPHANS_END, str(os.getpid()), *command]


def end_with_launcher() -> None:
    """Let the system send this process, a rank, SIGTERM when its launcher ends in any way (Linux, prctl)."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None, use_errno=True).prctl(1, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() == 1:  # it has ended already
        os.kill(os.getpid(), signal.SIGTERM)


def line_of(text: str, *, is_error: bool) -> Line:
    """A line with its rank: torchrun prefixes the lines of rank 1 with "[default1]:"."""
    match = _RANK.match(text)
    return Line(int(match[1]), text[match.end() :], is_error) if match else Line(None, text, is_error)


def option_words(options: Mapping[str, object]) -> list[str]:
    """Options as words of a command line, without None, False and ""; a list repeats its flag for each element."""
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, list):
            words += [word for one in value for word in (flag, str(one))]
        elif value is not None and value is not False and value != "":
            words += [flag, str(value)]
    return words


class Line(Struct, frozen=True):
    """One line of output; `rank` is None for the launcher's own words."""

    rank: int | None
    text: str
    is_error: bool


class GrowingFile:
    """A file that is read as it grows. It need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset_bytes = 0
        self._rest = b""

    def lines(self) -> Iterator[str]:
        """The lines completed since the last call, as a terminal would show them."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset_bytes)
                new = file.read()
        except OSError:
            return
        if not new:
            return
        self._offset_bytes += len(new)
        *whole, rest = (self._rest + new).split(b"\n")
        self._rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]  # drop overwritten states of a progress bar
        yield from map(_last_state, whole)

    def rest(self) -> Iterator[str]:
        """The last, unterminated line; a second call yields nothing."""
        last, self._rest = self._rest, b""
        if last:
            yield _last_state(last)


def _last_state(raw: bytes) -> str:
    """The last state of a line that overwrites itself with carriage returns, such as a progress bar."""
    return raw.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
