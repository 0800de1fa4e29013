"""Other processes that decode parts of a trace file meanwhile, where it is large and there are cores.

A process that does nothing else yet, as a command line at its start, forks (`begin`): that costs a millisecond, and the
other one imports what it needs while this one imports the rest. Anything else starts fresh ones: a kernel may hold a
GPU, which no fork survives.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from gpulab.trace import cache

if TYPE_CHECKING:
    import subprocess

    from gpulab.trace.parts import Part

MOST_PARTS = 8  # each reads and unpacks the whole file
# Below these sizes one process is done before another has begun:
FORK_FROM_BYTES = 1 << 20
FRESH_FROM_BYTES = 6 << 20
PLAIN_PER_GZIP = 16  # bytes of a trace's text in a byte of its gzip file

_WORKER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from gpulab.trace.other_processes import write_part
write_part(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.stdout.fileno())
"""

_begun: dict[str, list[Other]] = {}


class Other:
    """One other process at work on a part of the file."""

    def __init__(self, pid: int, output: IO[bytes], process: subprocess.Popen[bytes] | None = None) -> None:
        self._pid, self._output, self._process = pid, output, process

    def part(self) -> Part | None:
        """What it decoded; None where it did not get to its end."""
        import msgspec

        from gpulab.trace.parts import read

        try:
            return read(self._output)
        except (EOFError, OSError, msgspec.MsgspecError):
            return None

    def end(self) -> None:
        """Nothing of it is left; closing its pipe ends it wherever it is."""
        self._output.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        else:
            import signal

            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)


def begin(path: str) -> None:
    """Fork what will decode the other parts of this file, if it is worth it. Only where no thread runs but this one."""
    if not hasattr(os, "fork") or cache.has(path):
        return
    count = _count(path, FORK_FROM_BYTES)
    for part in range(1, count):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(reading)
                write_part(path, part, count, writing)
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        _begun.setdefault(os.path.realpath(path), []).append(Other(pid, os.fdopen(reading, "rb")))


def end_all() -> None:
    """End those that were begun for a file that was not read in the end."""
    while _begun:
        for other in _begun.popitem()[1]:
            other.end()


@contextlib.contextmanager
def reading(path: Path, parts: int | None) -> Iterator[list[Other]]:
    """The other processes at work on this file: those begun before, else fresh ones. None is left afterwards."""
    others = _begun.pop(os.path.realpath(path), [])
    try:
        if not others:
            count = _count(path, FRESH_FROM_BYTES) if parts is None else parts
            others += [_fresh(path, part, count) for part in range(1, count)]
        yield others
    finally:
        for other in others:
            other.end()


def write_part(path: str, part: int, parts: int, descriptor: int) -> None:
    """Decode one part and write it. What another process does."""
    from gpulab.errors import TraceError
    from gpulab.trace.json_text import TraceText
    from gpulab.trace.parts import decode, write

    with contextlib.suppress(TraceError, OSError), os.fdopen(descriptor, "wb") as output:
        write(decode(TraceText(Path(path)), part, parts), output)


def _fresh(path: Path, part: int, parts: int) -> Other:
    import subprocess

    from gpulab.devices.child_path import import_path
    from gpulab.devices.own_processes import marked

    numbers = [str(part), str(parts)]
    command = [sys.executable, "-S", "-P", "-c", _WORKER, json.dumps(import_path()), str(path), *numbers]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=marked()
    )
    assert process.stdout is not None
    return Other(process.pid, process.stdout, process)


def _count(path: str | Path, from_bytes: int) -> int:
    """How many processes are worth it; also 1 where the file cannot be looked at, which the reader will say better."""
    try:
        size_bytes = os.stat(path).st_size
        with open(path, "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
    except OSError:
        return 1
    if size_bytes < from_bytes * (1 if zipped else PLAIN_PER_GZIP):
        return 1
    from gpulab.devices.cgroups import core_quotas

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_PARTS, int(min([float(cores), *core_quotas()]))))
