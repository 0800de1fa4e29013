"""`gpulab record --ranks N`: a script in N processes of PyTorch's own launcher, each a rank that is recorded."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from gpulab.launch.launcher import (
    ended_with_this_process,
    launcher_words,
    record_words,
    shortage,
    threads_of_each,
)
from gpulab.launch.own_ranks import own_ranks

_OPTIONS = ("only_ranks", "name", "steps", "warmup", "trace_steps", "device", "html", "json")
_SWITCHES = ("no_trace", "whole", "no_live", "no_save", "all")


def launch(options: argparse.Namespace) -> int:
    """Do `gpulab record --ranks N`. Returns the launcher's exit status: 0 where every rank ended with 0."""
    if short := shortage(options.ranks):
        sys.stderr.write(f"gpulab: {short}\n")
    if (own := own_ranks(_text(options.script), sure=True)) is not None:
        sys.stderr.write(
            f"gpulab: {own.starter} in line {own.line} starts ranks of its own, in each of these "
            f"{options.ranks} ranks: write {own.instead} in its place.\n"
        )
    words = ended_with_this_process([*launcher_words(options.ranks), *_of_each(options)])
    with subprocess.Popen(words, env={**os.environ, **threads_of_each(options.ranks)}) as process:
        return _status(_ended(process))


def _of_each(options: argparse.Namespace) -> Sequence[str]:
    """The command of each rank: the same options, without the number of ranks."""
    given = {name: getattr(options, name) for name in (*_OPTIONS, *_SWITCHES)}
    return record_words({**given, "with_launcher": True}, [options.script, *options.args])


def _text(script: str) -> str:
    """Empty where it cannot be read, which each rank says."""
    try:
        return importlib.util.decode_source(Path(script).read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for the launcher, which is told of SIGTERM; of Ctrl-C the terminal tells it by itself."""

    def tell(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, tell)
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def _status(code: int) -> int:
    """As a shell has it: 128 and the signal."""
    return code if code >= 0 else 128 - code
