"""An interrupt (Ctrl-C, the notebook's stop button) is raised in the user's code only, and heard wherever it comes.

Raised in the middle of our own work it would leave that half done: a patch in torch, a state half put back. And where
the user's code swallows it (in a `__del__`, in a DataLoader whose workers it has killed) a loop of many runs would go
on with the next one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from msgspec import Struct

PATIENCE_S = 3.0  # who interrupts again after this long is not to be kept waiting


class Interrupted(KeyboardInterrupt):
    """Ends a cell after its result was shown. A notebook shows one line of it: the traceback would name our code."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Heard(Struct):
    """`error` is what the interrupt raised, or would have raised in the user's code; None: there was none."""

    error: BaseException | None = None


class _Now(Struct):
    """Of the main thread, to which interrupts come: whether the user's code is running there, and the last one."""

    in_code: bool = False
    last_s: float | None = None

    def raises(self) -> bool:
        now_s, last_s = time.monotonic(), self.last_s
        self.last_s = now_s
        return self.in_code or (last_s is not None and now_s - last_s > PATIENCE_S)


_now = _Now()


@contextmanager
def interrupts_heard(stop: Callable[[], None]) -> Iterator[Heard]:
    """Inside, an interrupt calls `stop`; within `users_code` it is then handled as before. In the main thread only."""
    heard, own = Heard(), os.getpid()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield heard
        return
    nested = getattr(before, "hears_for_gpulab", False)

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:  # worker processes inherit it
            before(number, frame)
            return
        stop()
        try:
            if nested or _now.raises():
                before(number, frame)
        except BaseException as e:
            heard.error = e
            raise
        heard.error = heard.error or KeyboardInterrupt()

    handle.hears_for_gpulab = True  # type: ignore[attr-defined]
    if not nested:
        _now.in_code, _now.last_s = False, None
    signal.signal(signal.SIGINT, handle)
    try:
        yield heard
    finally:
        if signal.getsignal(signal.SIGINT) is handle:
            signal.signal(signal.SIGINT, before)


@contextmanager
def users_code() -> Iterator[None]:
    """The user's code runs inside: an interrupt may be raised."""
    ours = threading.current_thread() is threading.main_thread()
    try:
        if ours:
            _now.in_code = True
        yield
    finally:
        if ours:
            _now.in_code = False
