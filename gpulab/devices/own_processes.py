"""The Python processes that gpulab starts for itself, which no figure of a run includes.

An environment variable marks these processes and, by inheritance, their children.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gpulab.user_code import PACKAGE_FOLDER

if TYPE_CHECKING:
    import subprocess

VARIABLE = "GPULAB_PROCESS"
_CALL = """
import importlib, json, sys
sys.path[:], module, function, arguments = json.loads(sys.argv[1])
sys.exit(getattr(importlib.import_module(module), function)(*arguments))
"""
_ENTRY = f"\0{VARIABLE}=".encode()


def marked(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a process that gpulab starts for itself."""
    return {**environment, VARIABLE: "1"}


def is_gpulabs(pid: int) -> bool:
    """Whether gpulab, or a process that gpulab started, started that process. False if the system does not show it."""
    try:
        return _ENTRY in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return _is_by_psutil(pid)


def _is_by_psutil(pid: int) -> bool:
    if os.path.isdir("/proc/self"):
        return False
    try:
        import psutil

        return VARIABLE in psutil.Process(pid).environ()
    except Exception:  # no psutil, no permission, or the process has ended
        return False


def run_python(call: str, *arguments: object, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """Call "module:function" in a separate Python process; returns its output. Raises subprocess.TimeoutExpired."""
    import subprocess

    return subprocess.run(
        _command(call, arguments),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
        env=marked(),
    )


def _command(call: str, arguments: Sequence[object]) -> list[str]:
    """The command line. The function gets its arguments as JSON, and uses this process's import path.

    Without `site`, Python starts in a third of the time.
    """
    module, _, function = call.partition(":")
    return [sys.executable, "-S", "-P", "-c", _CALL, json.dumps([import_path(), module, function, arguments])]


def start_child(
    call: str, *arguments: object, stderr: int | None = None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a child that runs `call` and talks by pipes. Raises OSError, ValueError and SubprocessError."""
    import subprocess

    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") or k == "PYTHONHOME"}
    return subprocess.Popen(
        _command(call, arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if stderr is None else stderr,
        env=marked(environment),
        pass_fds=pass_fds,
        start_new_session=True,  # an interrupt goes to the notebook's whole process group; the child must outlive it
    )


@contextmanager
def ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ask such a child to end; wait for it in the block. If it still runs afterwards, it is killed."""
    assert process.stdin is not None and process.stdout is not None
    try:
        with suppress(OSError):  # if it has already ended; closing its input is not enough while workers hold the pipe
            os.write(process.stdin.fileno(), b".")
        yield
    finally:  # also after an interrupt
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdin.close()


def write_message(message: Mapping[str, object]) -> None:
    """A child's message to its parent: one line of JSON on its output."""
    line = (json.dumps(message) + "\n").encode()
    while line:
        line = line[os.write(1, line) :]


def import_path() -> list[str]:
    """A `sys.path` for another process, which may run in another folder: the empty entry becomes the current folder."""
    return [*(path or os.getcwd() for path in sys.path), str(PACKAGE_FOLDER.resolve().parent)]
