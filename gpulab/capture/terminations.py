"""SIGTERM (`scancel`, a time limit, an eviction) first ends the run, then does what it would have done without gpulab.

Whoever handles it in the user's code is asked after the run is written: a handler that was there before, or one that
the code sets while it runs. Without one the process ends, by that signal.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNAL = signal.SIGTERM
WORDS = "SIGTERM"
_SET, _GET = signal.signal, signal.getsignal


class Terminations:
    """Of one run, on the main thread only. `soon` is called at the first signal, `at_once` at the next."""

    def __init__(self, soon: Callable[[], None], at_once: Callable[[], None]) -> None:
        self._soon, self._at_once = soon, at_once
        self._theirs: Any = None
        self._functions: tuple[Any, Any] = (_SET, _GET)  # as they were before
        self._begun = False
        self.count = 0  # of signals

    def begin(self) -> None:
        """Listen. Does nothing on another thread, or where the process takes no notice of the signal."""
        if threading.current_thread() is not threading.main_thread():
            return
        theirs = _GET(SIGNAL)
        if theirs is None or theirs is signal.SIG_IGN:
            return
        self._theirs, self._begun = theirs, True
        self._functions = signal.signal, signal.getsignal
        _SET(SIGNAL, self._handle)
        vars(signal).update(signal=self._signal, getsignal=self._getsignal)
        _listening.append(weakref.ref(self))

    def end(self) -> None:
        """Everything is as the user's code left it. May be called twice."""
        if not self._begun:
            return
        self._begun = False
        if signal.signal == self._signal:
            signal.signal, signal.getsignal = self._functions
        if _GET(SIGNAL) == self._handle:
            _SET(SIGNAL, self._theirs)
        _listening[:] = [ref for ref in _listening if ref() not in (None, self)]

    def deliver(self) -> None:
        """After `end`: what the signal does without gpulab. Does nothing where none came."""
        count, self.count = self.count, 0
        if count:
            os.kill(os.getpid(), SIGNAL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._theirs is signal.SIG_IGN:
            return
        self.count += 1
        (self._soon if self.count == 1 else self._at_once)()

    def _signal(self, number: int, handler: Any) -> Any:
        """The user's code sets a handler: it is called when the run is written."""
        allowed = callable(handler) or handler in (signal.SIG_DFL, signal.SIG_IGN)
        ours = number == SIGNAL and self._begun and _GET(SIGNAL) == self._handle
        if not (ours and allowed and threading.current_thread() is threading.main_thread()):
            return self._functions[0](number, handler)
        before, self._theirs = self._theirs, handler
        return before

    def _getsignal(self, number: int) -> Any:
        before = self._functions[1](number)
        return self._theirs if before == self._handle else before


_listening: list[weakref.ref[Terminations]] = []


def _forget_all() -> None:
    """In a forked child, a worker of a DataLoader for one: it is no run."""
    for ref in reversed(_listening):
        if (terminations := ref()) is not None:
            terminations.end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
