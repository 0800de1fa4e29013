"""Where a recorded script stands, for who waits at a terminal or reads its log: a line of its own now and then.

Whole lines: one that is renewed in place would run into what the script itself prints.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from gpulab.formatting import number, while_s
from gpulab.views.running.alert_lines import INTERVAL_S, AlertLines

if TYPE_CHECKING:
    from gpulab.live_feed import Status

FIRST_S = 2.0  # who waits longer at a terminal wonders
TERMINAL_S, LOG_S = 10.0, 60.0  # between two lines


class ProgressLines(AlertLines):
    """A `Watcher` that also says every `every_s` seconds how far the run is, and at its end that the report follows."""

    def __init__(self, stream: TextIO, *, first_s: float, every_s: float, interval_s: float = INTERVAL_S) -> None:
        super().__init__(stream, interval_s)
        self._next_s = first_s
        self._every_s = every_s
        self._spoken = False

    def _heed(self, status: Status) -> None:
        super()._heed(status)
        if status.elapsed_s >= self._next_s:
            self._next_s = status.elapsed_s - status.elapsed_s % self._every_s + self._every_s
            self._spoken = True
            self._write(f"gpulab: {status_words(status)}\n")

    def end(self) -> None:
        super().end()
        if self._spoken:
            with suppress(Exception):
                self._write("gpulab: the script has ended; making its report …\n")


def status_words(status: Status) -> str:
    """ "40 s, step 120 of 500, profiling"."""
    of_all = f" of {number(status.total)}" if status.total is not None and status.step <= status.total else ""
    step = f"step {number(status.step)}{of_all}" if status.step else "no step yet"
    return f"{while_s(status.elapsed_s)}, {step}, {status.phase}"


def progress_lines_or_none() -> ProgressLines | None:
    """Lines on standard error, seldom where it is a file; None where there is none."""
    try:
        terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):  # no standard error, or a closed one
        return None
    first_s, every_s = (FIRST_S, TERMINAL_S) if terminal else (LOG_S, LOG_S)
    return ProgressLines(sys.stderr, first_s=first_s, every_s=every_s)
