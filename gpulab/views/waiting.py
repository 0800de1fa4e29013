"""Status lines for slow work: for a command that takes longer than a moment, and for a run in a terminal."""

from __future__ import annotations

import contextvars
import math
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from msgspec.structs import replace

from gpulab.formatting import number, while_s
from gpulab.views.live_view import Sentence
from gpulab.views.widgets import Output, Repeater, in_notebook

if TYPE_CHECKING:
    from gpulab.live_feed import Feed, Status

FIRST_S = 1.5  # the line appears within 2 s: after that, a user wonders whether the command hangs
RENEWED_S = 1.0

BAR = 20  # signs
LEAST_FRACTION = 0.02  # below this fraction, the remaining time is a guess

_current: contextvars.ContextVar[Wait | None] = contextvars.ContextVar("gpulab_waiting", default=None)


class Wait:
    """The current work, and the fraction that is done, if known."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._since_s = time.monotonic()
        self._fraction: float | None = None

    def tell(self, fraction: float) -> None:
        """Set the fraction that is done, from 0 to 1."""
        self._fraction = fraction

    def words(self, began_s: float) -> str:
        """The status line. Its remaining time is extrapolated from the fraction that is done."""
        now_s = time.monotonic()
        so_far = f"{self.what}, {while_s(now_s - began_s)}"
        fraction = self._fraction
        if fraction is None or not LEAST_FRACTION <= fraction < 1:  # after reading, the work goes on
            return so_far
        rest_s = (now_s - self._since_s) * (1 / fraction - 1)
        full = round(BAR * fraction)
        bar = f"[{'#' * full}{'.' * (BAR - full)}] {100 * fraction:.0f} %"
        return f"{so_far} {bar}, {'about ' if rest_s >= 1 else ''}{while_s(rest_s)} left"

    @contextmanager
    def inside(self, what: str) -> Iterator[Wait]:
        """A wait within this wait; meanwhile the line shows the inner one."""
        before = self.what, self._since_s, self._fraction
        self.what, self._since_s, self._fraction = what, time.monotonic(), None
        try:
            yield self
        finally:
            self.what, self._since_s, self._fraction = before


@contextmanager
def waiting(what: str, *, first_s: float = FIRST_S, renewed_s: float = RENEWED_S, log: bool = False) -> Iterator[Wait]:
    """Shows `what` with the time so far during the block: as a notebook's output, else on standard error if a terminal.

    Nested waits share one line, with the time of the outer wait and the words of the inner one. `log`: also write one
    line if standard error is piped into a file.
    """
    outer = _current.get()
    if outer is not None:
        with outer.inside(what) as wait:
            yield wait
        return
    wait = Wait(what)
    line = Output() if in_notebook() else TerminalLine(f"gpulab: {what} …\n" if log else "")
    if isinstance(line, TerminalLine) and not line:
        yield wait
        return
    outside, began_s = _current.set(wait), time.monotonic()

    def write() -> None:
        line.write(f"gpulab: {wait.words(began_s)}")

    if not first_s:  # an import may block the other thread for seconds
        write()
    repeater = Repeater("waiting", write, renewed_s, first_s or renewed_s)
    try:
        yield wait
    finally:
        _current.reset(outside)
        repeater.stop()
        line.clear()


def _is_terminal(stream: TextIO | None) -> bool | None:
    """Whether the stream is a terminal; None if it is missing or closed."""
    try:
        return stream.isatty() if stream is not None else None
    except (AttributeError, ValueError):
        return None


class TerminalLine:
    """A line on standard error that is rewritten, if that is a terminal; otherwise `log` is written once."""

    def __init__(self, log: str = "") -> None:
        self._stream = sys.stderr
        self._is_terminal = _is_terminal(sys.stderr)
        self._log = log if self._is_terminal is False else ""
        self._width = 0

    def __bool__(self) -> bool:
        """Whether anything is written."""
        return bool(self._is_terminal or self._log)

    def write(self, text: str) -> None:
        """Replace the line."""
        if self._is_terminal:
            text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps could not be erased
            self._put("\r" + text.ljust(self._width))
            self._width = len(text)
        elif self._log:
            self._put(self._log)
            self._log = ""

    def clear(self) -> None:
        """Erase the line."""
        if self._width:
            self._put("\r" + " " * self._width + "\r")
            self._width = 0

    def _put(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


# The progress of a run, for a terminal or a log: a new line now and then.


INTERVAL_S = 1.0
FIRST_PROGRESS_S = 2.0  # after that, a user wonders whether the run hangs
TERMINAL_S, LOG_S = 10.0, 60.0  # between two lines; without steps, a log has lines as often as a terminal
_PHASES = {"measuring": "timing", "profiling": "tracing", "after profiling": "timing"}  # as in the live view


class RunLines:
    """A `Monitor` that writes to `stream` when an alert begins and ends.

    If `what` is not empty, it also writes the progress every `every_s` seconds, and at the end that the report follows.
    Nothing in this class may break the run: a failure quietly ends the lines.
    """

    def __init__(
        self, stream: TextIO, what: str = "", *, every_s: float = TERMINAL_S, interval_s: float = INTERVAL_S
    ) -> None:
        self._stream = stream
        self._what = what
        self._every_s = every_s
        self._interval_s = interval_s
        self._next_s = FIRST_PROGRESS_S if what else math.inf
        self._alerted = False
        self._sentence = Sentence()
        self._repeater: Repeater | None = None

    def begin(self, feed: Feed) -> None:
        """Start the thread that reads the feed."""

        def read() -> None:
            status = feed.drain().status
            self.tell(replace(status, message=self._sentence.words(feed, status.elapsed_s)))

        self._repeater = Repeater("alerts", read, self._interval_s)

    def tell(self, status: Status) -> None:
        """Write the lines that are due."""
        if bool(status.alert) != self._alerted:
            self._alerted = bool(status.alert)
            self._write(f"\ngpulab: {_with_so_far(status.alert, status) if status.alert else 'That is over.'}\n")
        if status.elapsed_s >= self._next_s:
            every_s = self._every_s if status.step else TERMINAL_S
            self._next_s = status.elapsed_s - status.elapsed_s % every_s + every_s
            self._write(f"gpulab: {_with_so_far(f'running {self._what}, {status_words(status)}', status)}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def end(self) -> None:
        """Stop reading and end the thread."""
        if self._repeater is not None:
            self._repeater.stop()
        if self._what and self._next_s > FIRST_PROGRESS_S:
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


def run_lines_or_none(what: str = "") -> RunLines | None:
    """Lines on standard error; with `what`, also (less often) in a file. None if nobody reads them."""
    terminal = _is_terminal(sys.stderr)
    if terminal or (what and terminal is not None):
        return RunLines(sys.stderr, what, every_s=TERMINAL_S if terminal else LOG_S)
    return None
