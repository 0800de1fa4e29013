"""A line at a terminal while a command works for longer than two seconds, taken away at its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpulab.formatting import while_s
from gpulab.views.running.terminal_line import TerminalLine

FIRST_S = 2.0  # who waits longer wonders
RENEWED_S = 1.0


@contextmanager
def waiting(what: str, *, first_s: float = FIRST_S, renewed_s: float = RENEWED_S) -> Iterator[None]:
    """Inside, `what` is said on standard error where that is a terminal, with the time so far."""
    line, over, began_s = TerminalLine(), threading.Event(), time.monotonic()
    if not line:
        yield
        return

    def look() -> None:
        pause_s = first_s
        while not over.wait(pause_s):
            line.write(f"gpulab: {what}, {while_s(time.monotonic() - began_s)}")
            pause_s = renewed_s

    thread = threading.Thread(target=look, name="gpulab-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        line.clear()
