"""An answer that never ends must not take the check with it: a limit for what runs on the main thread."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeLimit(BaseException):
    """Raised in the code that ran for too long; no Exception, so that an answer's own `except` does not take it."""


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raises TimeLimit in the block after `limit_s` seconds, on the main thread of Linux or macOS; elsewhere: no limit.

    A timer that somebody else has set goes on afterwards; where it rings sooner, there is no limit of ours.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    others_s, began_s = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic()
    if 0 < others_s <= limit_s:
        yield
        return

    def over(_signal: int, _frame: FrameType | None) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if others_s:
            signal.setitimer(signal.ITIMER_REAL, max(others_s - (time.monotonic() - began_s), 1e-3))
