"""A run's alerts in a terminal, where there is no live view: one line when it begins, one when it is over."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

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

    def begin(self, feed: Feed) -> None:
        """Start the thread that looks for alerts."""
        self._thread = threading.Thread(target=self._look, args=(feed,), name="gpulab-alerts", daemon=True)
        with suppress(RuntimeError):  # no thread can be started
            self._thread.start()

    def _look(self, feed: Feed) -> None:
        with suppress(Exception):
            while not self._over.wait(self._interval_s):
                self._heed(feed.drain().status)

    def _heed(self, status: Status) -> None:
        if bool(status.alert) != self._said:
            self._said = bool(status.alert)
            self._write(f"\ngpulab: {status.alert or 'That is over.'}\n")

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
