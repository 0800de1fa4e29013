"""Lines while something works: of a command that takes longer than a moment, and of a run in a terminal."""

from __future__ import annotations

import contextvars
import html
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol, TextIO

from msgspec.structs import replace

from gpulab.formatting import number, while_s
from gpulab.views.live_view import Sentence, in_notebook
from gpulab.views.widgets import Output

if TYPE_CHECKING:
    from gpulab.live_feed import Feed, Status

FIRST_S = 1.5  # the line is there before two seconds are over: who waits longer wonders
RENEWED_S = 1.0

BAR = 20  # signs
TOLD_FROM = 0.02  # before, the time that is left is a guess

_said: contextvars.ContextVar[Wait | None] = contextvars.ContextVar("gpulab_waiting", default=None)


class Line(Protocol):
    """Where the line stands."""

    def write(self, text: str) -> None: ...
    def clear(self) -> None: ...


class Wait:
    """What is waited for just now, and how much of it is done where that is known."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._since_s = time.monotonic()
        self._fraction: float | None = None

    def tell(self, fraction: float) -> None:
        """So much of it is done, from 0 to 1."""
        self._fraction = fraction

    def words(self, began_s: float) -> str:
        """A line. The end that it names follows from what is done so far."""
        now_s = time.monotonic()
        so_far = f"{self.what}, {while_s(now_s - began_s)}"
        fraction = self._fraction
        if fraction is None or not TOLD_FROM <= fraction < 1:  # what is read must still be put together
            return so_far
        left_s = (now_s - self._since_s) * (1 / fraction - 1)
        full = round(BAR * fraction)
        bar = f"[{'#' * full}{'.' * (BAR - full)}] {100 * fraction:.0f} %"
        return f"{so_far} {bar}, {'about ' if left_s >= 1 else ''}{while_s(left_s)} left"

    @contextmanager
    def inside(self, what: str) -> Iterator[Wait]:
        """A wait within this one: it has the line meanwhile."""
        before = self.what, self._since_s, self._fraction
        self.what, self._since_s, self._fraction = what, time.monotonic(), None
        try:
            yield self
        finally:
            self.what, self._since_s, self._fraction = before


@contextmanager
def waiting(what: str, *, first_s: float = FIRST_S, renewed_s: float = RENEWED_S, log: bool = False) -> Iterator[Wait]:
    """Inside, `what` is shown with the time so far: as a notebook's output, else on standard error if a terminal.

    Waits within each other have one line, with the time of the outer one and the words of the inner one. `log`: who
    pipes standard error is told, too, once.
    """
    terminal = TerminalLine()
    line: Line = _OutputLine() if in_notebook() else terminal
    if log and line is terminal and not terminal and sys.stderr is not None:
        line = _LogLine(sys.stderr, what)
    outer = _said.get()
    if outer is not None:
        with outer.inside(what) as wait:
            yield wait
        return
    wait = Wait(what)
    if line is terminal and not terminal:
        yield wait
        return
    outside = _said.set(wait)
    over, began_s, context = threading.Event(), time.monotonic(), contextvars.copy_context()

    def look(pause_s: float) -> None:
        while not over.wait(pause_s):
            line.write(f"gpulab: {wait.words(began_s)}")
            pause_s = renewed_s

    if not first_s:  # what is imported may keep the other thread from it for seconds
        line.write(f"gpulab: {wait.words(began_s)}")
        first_s = renewed_s
    # the context says to which cell an output belongs
    thread = threading.Thread(target=context.run, args=(look, first_s), name="gpulab-waiting", daemon=True)
    thread.start()
    try:
        yield wait
    finally:
        _said.reset(outside)
        over.set()
        thread.join()
        line.clear()


class _OutputLine:
    """An output of the cell that waits."""

    def __init__(self) -> None:
        self._output = Output()

    def write(self, text: str) -> None:
        """In place of what stands there."""
        self._output.show({"text/plain": text, "text/html": f'<div style="font-size:13px">{html.escape(text)}</div>'})

    def clear(self) -> None:
        """Take the line away."""
        self._output.clear()


class _LogLine:
    """One line that stays: nobody takes it away in a file."""

    def __init__(self, stream: TextIO, what: str) -> None:
        self._stream = stream
        self._text = f"gpulab: {what} …\n"

    def write(self, text: str) -> None:
        stream_text, self._text = self._text, ""
        with suppress(OSError, ValueError):
            self._stream.write(stream_text)
            self._stream.flush()

    def clear(self) -> None:
        """It stays."""


class TerminalLine:
    """On standard error; nothing is written where that is no terminal."""

    def __init__(self) -> None:
        self._stream = _terminal()
        self._width = 0

    def __bool__(self) -> bool:
        """Whether somebody can see it."""
        return self._stream is not None

    def write(self, text: str) -> None:
        """In place of what stands there."""
        text = text[: shutil.get_terminal_size().columns - 1]  # a longer one would stay, line by line
        self._put("\r" + text.ljust(self._width))
        self._width = len(text)

    def clear(self) -> None:
        """Take the line away."""
        if self._width:
            self._put("\r" + " " * self._width + "\r")
            self._width = 0

    def _put(self, text: str) -> None:
        if self._stream is not None:
            with suppress(OSError, ValueError):
                self._stream.write(text)
                self._stream.flush()


def _terminal() -> TextIO | None:
    try:
        return sys.stderr if sys.stderr.isatty() else None
    except (AttributeError, ValueError):  # no standard error, or a closed one
        return None


INTERVAL_S = 1.0
JOIN_TIMEOUT_S = 5.0


class AlertLines:
    """A `Watcher` that writes to `stream`. Nothing here may break the run: a failure ends the lines, quietly."""

    def __init__(self, stream: TextIO, interval_s: float = INTERVAL_S) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._said = False
        self._sentence = Sentence()

    def begin(self, feed: Feed) -> None:
        """Start the thread that looks for alerts."""
        self._thread = threading.Thread(target=self._look, args=(feed,), name="gpulab-alerts", daemon=True)
        with suppress(RuntimeError):  # no thread can be started
            self._thread.start()

    def _look(self, feed: Feed) -> None:
        with suppress(Exception):
            while not self._over.wait(self._interval_s):
                status = feed.drain().status
                self._heed(replace(status, message=self._sentence.words(feed, status.elapsed_s)))

    def _heed(self, status: Status) -> None:
        if bool(status.alert) != self._said:
            self._said = bool(status.alert)
            self._write(f"\ngpulab: {_with_so_far(status.alert, status) if status.alert else 'That is over.'}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def end(self) -> None:
        """Stop looking, leave no thread."""
        self._over.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)


def alert_lines_or_none() -> AlertLines | None:
    """Lines on standard error; None where nobody reads them there as they come."""
    try:
        return AlertLines(sys.stderr) if sys.stderr.isatty() else None
    except (AttributeError, ValueError):  # no standard error, or a closed one
        return None


# Where a recorded script stands, for who waits at a terminal or reads its log: a line of its own now and then.


FIRST_PROGRESS_S = 2.0  # who waits longer wonders
_PHASES = {"measuring": "timing", "profiling": "tracing", "after profiling": "timing"}  # as in the live view
TERMINAL_S, LOG_S = 10.0, 60.0  # between two lines; without a step both as at a terminal


class ProgressLines(AlertLines):
    """A `Watcher` that also says every `every_s` seconds how far the run is, at its end that the report follows."""

    def __init__(
        self, stream: TextIO, what: str = "the script", *, every_s: float, interval_s: float = INTERVAL_S
    ) -> None:
        super().__init__(stream, interval_s)
        self._what = what
        self._next_s = FIRST_PROGRESS_S
        self._every_s = every_s
        self._spoken = False

    def _heed(self, status: Status) -> None:
        super()._heed(status)
        if status.elapsed_s >= self._next_s:
            every_s = self._every_s if status.step else TERMINAL_S
            self._next_s = status.elapsed_s - status.elapsed_s % every_s + every_s
            self._spoken = True
            self._write(f"gpulab: {_with_so_far(f'running {self._what}, {status_words(status)}', status)}\n")

    def end(self) -> None:
        super().end()
        if self._spoken:
            with suppress(Exception):
                self._write(f"gpulab: {self._what} has ended; making its report …\n")


def _with_so_far(words: str, status: Status) -> str:
    return f"{words.rstrip('.')}. {status.message}" if status.message else words


def status_words(status: Status) -> str:
    """ "40 s: step 120 of 500, profiling"."""
    if not status.step:
        return f"{while_s(status.elapsed_s)}: before the first step"
    of_all = ""
    if status.total is not None and status.step <= status.total:
        epoch = status.total_of == "epoch"  # which a loop may leave early
        of_all = f" of at most {number(status.total)} (one epoch)" if epoch else f" of {number(status.total)}"
    phase = _PHASES.get(status.phase, status.phase)
    return f"{while_s(status.elapsed_s)}: step {number(status.step)}{of_all}, {phase}"


def progress_lines_or_none(what: str) -> ProgressLines | None:
    """Lines on standard error about `what` runs, seldom where it is a file; None where there is none."""
    try:
        terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):  # no standard error, or a closed one
        return None
    return ProgressLines(sys.stderr, what, every_s=TERMINAL_S if terminal else LOG_S)
