"""An interrupt (Ctrl-C, the notebook's stop button) that is heard although something else has swallowed it.

It arrives wherever the user's code happens to be. Where that is a `__del__`, or a DataLoader whose workers it has
killed, no KeyboardInterrupt comes out, and a loop of many runs would go on with the next one.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class Heard:
    """`error` is what the interrupt raised; None: there was none."""

    error: BaseException | None = None


@contextmanager
def interrupts_heard(stop: Callable[[], None]) -> Iterator[Heard]:
    """Inside, an interrupt calls `stop` and is then handled as before. It comes to the main thread only."""
    heard, own = Heard(), os.getpid()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield heard
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == own:  # worker processes inherit it
            stop()
        try:
            before(number, frame)
        except BaseException as e:
            heard.error = e
            raise

    signal.signal(signal.SIGINT, handle)
    try:
        yield heard
    finally:
        if signal.getsignal(signal.SIGINT) is handle:
            signal.signal(signal.SIGINT, before)


__all__ = ["Heard", "interrupts_heard"]
