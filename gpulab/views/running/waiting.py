"""A line at a terminal while a command works for longer than two seconds, taken away at its end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from gpulab.formatting import while_s

FIRST_S = 2.0  # who waits longer wonders
RENEWED_S = 1.0


@contextmanager
def waiting(what: str, *, first_s: float = FIRST_S, renewed_s: float = RENEWED_S) -> Iterator[None]:
    """Inside, `what` is said on standard error where that is a terminal, with the time so far."""
    stream, over, began_s = _terminal(), threading.Event(), time.monotonic()
    if stream is None:
        yield
        return
    line = _Line(stream, what)

    def look() -> None:
        pause_s = first_s
        while not over.wait(pause_s):
            line.renew(time.monotonic() - began_s)
            pause_s = renewed_s

    thread = threading.Thread(target=look, name="gpulab-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        line.clear()


class _Line:
    """Nothing here may break the command: a stream that fails is left alone."""

    def __init__(self, stream: TextIO, what: str) -> None:
        self._stream = stream
        self._what = what
        self._width = 0

    def renew(self, elapsed_s: float) -> None:
        text = f"gpulab: {self._what}, {while_s(elapsed_s)}"
        self._write("\r" + text.ljust(self._width))
        self._width = len(text)

    def clear(self) -> None:
        if self._width:
            self._write("\r" + " " * self._width + "\r")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def _terminal() -> TextIO | None:
    try:
        return sys.stderr if sys.stderr.isatty() else None
    except (AttributeError, ValueError):  # no standard error, or a closed one
        return None
