"""`gpulab record --ranks N`: a script in N processes of PyTorch's own launcher, each a rank that is recorded."""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from gpulab.devices.machine import usable_cores
from gpulab.formatting import plural

LAUNCHER = ("-m", "torch.distributed.run", "--standalone")  # torchrun, of this Python
THREADS = "OMP_NUM_THREADS"
_VALUES = ("name", "steps", "warmup", "trace_steps", "device", "html", "json")
_SWITCHES = ("no_trace", "whole", "no_live", "no_save", "all")


def launch(options: argparse.Namespace) -> int:
    """Do `gpulab record --ranks N`. Returns the launcher's exit status: 0 where every rank ended with 0."""
    cores = max(1, math.floor(usable_cores()))
    if options.ranks > cores:
        sys.stderr.write(f"gpulab: {plural(options.ranks, 'rank')} share {plural(cores, 'processor core')}.\n")
    threads = os.environ.get(THREADS) or str(max(1, cores // options.ranks))  # without it torchrun takes 1 and warns
    words = [sys.executable, *LAUNCHER, "--nproc-per-node", str(options.ranks), *_of_each(options)]
    with subprocess.Popen(words, env={**os.environ, THREADS: threads}) as process:
        return _status(_ended(process))


def _of_each(options: argparse.Namespace) -> Sequence[str]:
    """The command of each rank: the same options, without the number of ranks."""
    return ["-m", "gpulab", "record", *_options(options), options.script, *options.args]


def _options(options: argparse.Namespace) -> Iterator[str]:
    for name in _VALUES:
        value = getattr(options, name)
        if value not in (None, ""):
            yield from (_flag(name), str(value))
    yield from (_flag(name) for name in _SWITCHES if getattr(options, name))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
