"""The real traces, each read once for all tests of a process."""

from __future__ import annotations

import functools
from pathlib import Path

from gpulab.trace.kineto_file import Trace, read_trace
from tests.support import real_traces

ALL = (*real_traces.SINGLE, *real_traces.RANKS)


def trace(name: str) -> Trace:
    """That trace; skips the test where it is absent."""
    return _read(real_traces.path(name))


@functools.cache
def _read(file: Path) -> Trace:
    return read_trace(file)
