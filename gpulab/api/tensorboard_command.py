"""`%gpulab tensorboard` and `gpulab tensorboard`: the stored runs in TensorBoard with torch-tb-profiler."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from gpulab.api.arguments import Parser, split, take_store
from gpulab.errors import UsageError
from gpulab.formatting import plural
from gpulab.store.runs import Runs
from gpulab.views import tensorboard_server

HELP = """\
{prog} [--port N] [--no-open]   open the stored runs in TensorBoard with torch-tb-profiler
{prog} --stop                   end it; it also ends with this process

The port is {port} or the next free one."""


def magic(runs: Runs, line: str) -> None:
    """Do what the rest of the line after `%gpulab tensorboard` asks. Raises UsageError and GpulabError."""
    print(command(runs, split(line, "%gpulab tensorboard"), "%gpulab tensorboard"))


def command(runs: Runs, words: Sequence[str], prog: str = "gpulab tensorboard") -> str:
    """Start, open or end TensorBoard; returns what is to be said. Raises UsageError and GpulabError."""
    parser = Parser(prog, "[--port N] [--no-open] [--stop]")
    parser.add_argument("--port")
    parser.add_argument("--no-open", action="store_true")
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    options = parser.read(words)
    if options.help:
        return HELP.format(prog=prog, port=tensorboard_server.FIRST_PORT)
    if options.stop:
        return "TensorBoard has ended." if tensorboard_server.stop() else "No TensorBoard of this process runs."
    server = tensorboard_server.start(runs, _port(options.port))
    if not options.no_open:
        _open(server.url)
    traces = plural(tensorboard_server.count_traces(runs), "run")
    where = f"TensorBoard shows {traces} with a trace: {server.url}"
    return f"{where}\nIt ends with this process. {tensorboard_server.NOTE}"


def terminal(words: Sequence[str], prog: str = "gpulab tensorboard") -> None:
    """For a terminal: say where TensorBoard is, and stay until it ends or Ctrl-C. Raises UsageError and GpulabError."""
    store, rest = take_store(words, prog)
    print(command(Runs(store), rest, prog), flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        tensorboard_server.wait()
    tensorboard_server.stop()


def _port(given: str | None) -> int | None:
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) < 10):
        raise UsageError(f"--port takes a number from 1 to 65535, not {given[:100]!r}.")
    return int(given)


def _open(url: str) -> None:
    """In the user's browser, where this machine has a screen: a text browser would take the terminal."""
    if sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        import webbrowser

        with contextlib.suppress(webbrowser.Error):
            webbrowser.open_new_tab(url)
