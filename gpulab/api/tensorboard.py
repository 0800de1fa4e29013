"""`gpulab tensorboard`: the stored traces in TensorBoard with torch-tb-profiler.

A trace has the file name that the plugin expects, so the store itself is the log folder.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from msgspec import Struct

from gpulab.api.runs_command import runs_of
from gpulab.devices.own_processes import marked
from gpulab.errors import GpulabError, UsageError
from gpulab.formatting import plural
from gpulab.store.exports import installed
from gpulab.store.folders import trace_path
from gpulab.views.view import Answer

NOTE = (
    "Its overview fetches a chart library from the network. torch-tb-profiler 0.4.3 misreads traces of today's "
    "PyTorch: trust the figures of gpulab's own report (%gpulab report)."
)

_PACKAGES = {"tensorboard": "tensorboard", "torch_tb_profiler": "torch-tb-profiler"}
_HOST = "127.0.0.1"
_URL = re.compile(rf"http://{re.escape(_HOST)}:\d+/")
_START_S = 120.0  # its imports take 5 to 20 s on two idle cores
_END_S = 6.0

# Its standard input closes when gpulab's process ends in any way. The plugin's processes are in its process group.
_CHILD = """
import os, signal, sys, threading, time
def end_with_input():
    os.read(0, 1)
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(0, number)
        time.sleep(3)
threading.Thread(target=end_with_input, daemon=True).start()
from tensorboard.main import run_main
run_main()
"""


class _Server(Struct, frozen=True):
    root: Path
    url: str
    process: subprocess.Popen[bytes]


_server: _Server | None = None


def open_tensorboard(options: argparse.Namespace) -> Answer:
    """Do `gpulab tensorboard`: at a terminal, stay until TensorBoard ends or Ctrl-C. Raises UsageError, GpulabError."""
    if options.stop:
        return Answer("TensorBoard has ended." if stop() else "No TensorBoard of this process runs.")
    missing = [name for module, name in _PACKAGES.items() if not installed(module)]
    if missing:
        raise UsageError(f"To open runs in TensorBoard, install it first: pip install {' '.join(missing)}.")
    store = runs_of(options).store
    paths = [entry.path for entry in store.list() if entry.problem is None and entry.path is not None]
    count = sum(trace_path(path) is not None for path in paths)
    if not count:
        raise UsageError(f"No run in {str(store.root)!r} has a trace to show: profile something first.")
    url = start(store.root, options.port)
    answer = f"TensorBoard shows {plural(count, 'run')} with a trace: {url}\nIt ends with this process. {NOTE}"
    if options.prog.startswith("%"):
        return Answer(answer)
    print(answer, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        if _server is not None:
            _server.process.wait()
    stop()
    return Answer()


def start(root: Path, port: int | None = None) -> str:
    """The address of a TensorBoard for that folder, already running or new.

    Raises GpulabError with TensorBoard's own message if it does not start.
    """
    global _server
    if _server is not None and _server.process.poll() is None and _server.root == root and port is None:
        return _server.url
    stop()
    options = ["--logdir", str(root), "--host", _HOST, "--load_fast=false", *(["--port", str(port)] if port else [])]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, *options],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=marked(),
                start_new_session=True,  # so that an interrupt of the notebook does not reach it
            )
        try:
            url = _await_url(process, log)
        except BaseException:  # also an interrupt: leave no process behind
            _end(process)
            raise
    _server = _Server(root, f"{url}#pytorch_profiler", process)
    return _server.url


def stop() -> bool:
    """End the TensorBoard of this process; False if there is none."""
    global _server
    server, _server = _server, None
    if server is not None:
        _end(server.process)
    return server is not None


atexit.register(stop)


def _await_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        address = _URL.search(log.read_text(errors="replace"))
        if address is not None:
            return address[0]
        time.sleep(0.1)
    if process.poll() is None:
        raise GpulabError(f"TensorBoard did not start within {_START_S:g} s: the machine may be busy. Try again.")
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    reasons = [
        line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")
    ]  # the plugin's other output may follow
    raise GpulabError(f"TensorBoard did not start: {(reasons or lines or ['it wrote nothing'])[-1][:300]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    process.kill()
    process.wait()
