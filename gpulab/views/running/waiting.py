"""One line while a command works for longer than a moment, taken away at its end: in a notebook or at a terminal."""

from __future__ import annotations

import contextvars
import html
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from gpulab.formatting import while_s
from gpulab.views.running.display import in_notebook
from gpulab.views.running.terminal_line import TerminalLine

FIRST_S = 1.5  # the line is there before two seconds are over: who waits longer wonders
RENEWED_S = 1.0

_said = contextvars.ContextVar("gpulab_waiting", default=False)


class Line(Protocol):
    """Where the line stands."""

    def write(self, text: str) -> None: ...
    def clear(self) -> None: ...


@contextmanager
def waiting(what: str, *, first_s: float = FIRST_S, renewed_s: float = RENEWED_S) -> Iterator[None]:
    """Inside, `what` is shown with the time so far: as a notebook's output, else on standard error if a terminal.

    Of waits within each other, the outer one is shown.
    """
    terminal = TerminalLine()
    line: Line = _OutputLine() if in_notebook() else terminal
    if _said.get() or (line is terminal and not terminal):
        yield
        return
    outside = _said.set(True)
    over, began_s, context = threading.Event(), time.monotonic(), contextvars.copy_context()

    def look() -> None:
        pause_s = first_s
        while not over.wait(pause_s):
            line.write(f"gpulab: {what}, {while_s(time.monotonic() - began_s)}")
            pause_s = renewed_s

    # the context says to which cell an output belongs
    thread = threading.Thread(target=context.run, args=(look,), name="gpulab-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _said.reset(outside)
        over.set()
        thread.join()
        line.clear()


class _OutputLine:
    """An output of the cell that waits; a front end that fails must not end what is waited for."""

    def __init__(self) -> None:
        self._handle: Any = None

    def write(self, text: str) -> None:
        """In place of what stands there."""
        from IPython.display import display

        bundle = {"text/plain": text, "text/html": f'<div style="font-size:13px">{html.escape(text)}</div>'}
        with suppress(Exception):
            if self._handle is None:
                self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
            else:
                self._handle.update(bundle, raw=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._handle is not None:
            with suppress(Exception):
                self._handle.update({"text/plain": "", "text/html": ""}, raw=True)
