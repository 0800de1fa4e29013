"""A run's alerts in a terminal, where there is no live view: one line when it begins, one when it is over."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from msgspec.structs import replace

from gpulab.formatting import number, while_s
from gpulab.views.running.diagnosis_line import Sentence

if TYPE_CHECKING:
    from gpulab.live_feed import Feed, Status

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


FIRST_S = 2.0  # who waits longer wonders
_PHASES = {"measuring": "timing", "profiling": "tracing", "after profiling": "timing"}  # as in the live view
TERMINAL_S, LOG_S = 10.0, 60.0  # between two lines; without a step both as at a terminal


class ProgressLines(AlertLines):
    """A `Watcher` that also says every `every_s` seconds how far the run is, at its end that the report follows."""

    def __init__(
        self, stream: TextIO, what: str = "the script", *, every_s: float, interval_s: float = INTERVAL_S
    ) -> None:
        super().__init__(stream, interval_s)
        self._what = what
        self._next_s = FIRST_S
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
