"""Stored runs in TensorBoard: its process, which ends with this one, and what has to be said about its pages.

A run's trace lies in the store under the name by which torch-tb-profiler finds it, so nothing is written for it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gpulab.devices.child_path import import_path
from gpulab.errors import GpulabError, UsageError
from gpulab.store.folders import trace_path
from gpulab.store.optional_packages import installed
from gpulab.store.runs import Runs

HOST = "127.0.0.1"
FIRST_PORT = 6006  # TensorBoard's own default
_PORTS_TRIED = 100
_START_S = 60.0  # its imports take 5 to 20 s on two cores
_END_S = 5.0
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from gpulab.views import tensorboard_child
tensorboard_child.main()
"""

NOTE = (
    "Its overview fetches a chart library from the network, and torch-tb-profiler 0.4.3 misreads traces of today's "
    "PyTorch: the figures to read are those of gpulab's own report (%gpulab report)."
)


@dataclass(slots=True)
class Server:
    """A TensorBoard that runs on the traces of one store."""

    root: Path
    port: int
    process: subprocess.Popen[bytes]
    output: IO[bytes]

    @property
    def url(self) -> str:
        """Its page of the profiler's plugin."""
        return f"http://{HOST}:{self.port}/#pytorch_profiler"

    @property
    def alive(self) -> bool:
        """Whether its process still runs."""
        return self.process.poll() is None

    def stop(self) -> None:
        """End the process and those it started; does nothing where it is gone."""
        assert self.process.stdin is not None
        self.process.stdin.close()  # it ends with its input
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            _kill(self.process)
        self.output.close()

    def last_words(self) -> str:
        """The last line it wrote."""
        self.output.seek(0)
        lines = [line for line in self.output.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else "it said nothing"


_PACKAGES = {"tensorboard": "tensorboard", "torch_tb_profiler": "torch-tb-profiler"}

_running: Server | None = None


def count_traces(runs: Runs) -> int:
    """Runs that TensorBoard will list."""
    return sum(entry.problem is None and trace_path(entry.path) is not None for entry in runs.store.list())


def start(runs: Runs, port: int | None = None) -> Server:
    """A TensorBoard on the store: the one that runs already, or a new one on this port or the next free one.

    Waits until it answers. Raises UsageError where it is not installed, where no run has a trace or the port is none,
    and GpulabError where it does not start.
    """
    global _running
    _require(runs, port)
    root = runs.store.root
    if _running is not None and _running.alive and _running.root == root and port in (None, _running.port):
        return _running
    stop()
    server = _spawn(root, _free_port(port or FIRST_PORT))
    try:
        _await_answer(server)
    except BaseException:  # an interrupt as well: leave no process behind
        server.stop()
        raise
    _running = server
    return server


def stop() -> bool:
    """End the TensorBoard of this process; False where there is none."""
    global _running
    server, _running = _running, None
    if server is None:
        return False
    server.stop()
    return True


def wait() -> None:
    """Until the TensorBoard of this process ends by itself."""
    if _running is not None:
        _running.process.wait()


atexit.register(stop)


def _require(runs: Runs, port: int | None) -> None:
    missing = [name for module, name in _PACKAGES.items() if not installed(module)]
    if missing:
        raise UsageError(f"To open runs in TensorBoard, install it first: pip install {' '.join(missing)}.")
    if port is not None and not 1 <= port <= 65_535:
        raise UsageError(f"A port is a number from 1 to 65535, not {port}.")
    if not count_traces(runs):
        raise UsageError(f"No run in {str(runs.store.root)!r} has a trace to show: profile something first.")


def _free_port(first: int) -> int:
    """That port, or the next one that nobody listens on."""
    for port in range(first, min(first + _PORTS_TRIED, 65_536)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            if os.name == "posix":  # there it means: also where a server has just ended
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return port
    raise UsageError(f"Port {first} and those after it are taken: choose another by --port.")


def _spawn(root: Path, port: int) -> Server:
    options = ["--logdir", str(root), "--host", HOST, "--port", str(port), "--load_fast=false"]
    output = tempfile.TemporaryFile()  # noqa: SIM115 - the server closes it
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD, *options, json.dumps(import_path())],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # an interrupt of the notebook is not meant for it
    )
    return Server(root, port, process, output)


def _await_answer(server: Server) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if not server.alive:
            raise GpulabError(f"TensorBoard did not start: {server.last_words()}")
        with contextlib.suppress(OSError), socket.create_connection((HOST, server.port), timeout=1):
            return
        time.sleep(0.1)
    raise GpulabError(f"TensorBoard did not answer within {_START_S:.0f} s: {server.last_words()}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
