"""Lets another thread end what a knob prepares within the user's code, compiling for one, when time is over.

A run ends at a step boundary, and code that waits for a compiler may not come to one for minutes. What takes long says
so meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from types import CodeType

from msgspec import Struct


class PreparationEnded(BaseException):
    """Raised within `endable`. No Exception, so that a compiler's own handlers let it pass."""


class _Current(Struct):
    """Of the one preparation at a time: its thread, and the module in whose functions it may be ended."""

    thread: int | None = None
    module: str = ""
    ending: bool = False  # somebody ends it, or has


class Status(Struct):
    """What is being prepared, in words for who waits; empty: nothing. Read from any thread."""

    words: str = ""


status = Status()
_MOST_BYTECODES = 1_000_000
_TRIES, _BETWEEN_TRIES_S = 100, 0.01

_current = _Current()
_lock = threading.Lock()  # of those who end; who prepares takes it only where somebody does


class endable:
    """Inside, `end` raises PreparationEnded on this thread, as long as a function of that module is running there.

    Cheap: a compiled module is called so in each step, for each call may compile anew.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        _current.module, _current.thread = self._module, self._thread

    def __exit__(self, *error: object) -> None:
        _current.thread = None
        if _current.ending:
            with _lock:
                _receive(self._thread)  # what was not delivered yet belongs to nobody
                _current.ending = False


def end() -> None:
    """End what is being prepared now, if anything. From any thread."""
    for _ in range(_TRIES):
        with _lock:
            _current.ending = True  # before the look at who prepares: one of the two sees the other
            thread = _current.thread
            frame = sys._current_frames().get(thread) if thread is not None else None
            codes = []
            while frame is not None and frame.f_globals.get("__name__") != _current.module:
                codes.append(frame.f_code)
                frame = frame.f_back
            if thread is None or frame is None:
                _current.ending = thread is not None
                return
            if not any(map(_swallows, codes)):
                _raise_in(thread)
                return
        time.sleep(_BETWEEN_TRIES_S)


def _swallows(code: CodeType) -> bool:
    """Whether Python calls it where no error can go anywhere: it would be printed, and lost."""
    callbacks = (*gc.callbacks, sys.unraisablehook)
    return code.co_name == "__del__" or any(code is getattr(c, "__code__", None) for c in callbacks)


def _receive(thread: int) -> None:
    """Let this thread raise what it was to raise.

    Merely taken back, CPython 3.11 goes on looking for it, and stands still for ever under a profile function.
    """
    try:
        _raise_in(thread)
        for _ in range(_MOST_BYTECODES):
            pass
    except PreparationEnded:
        pass


def _raise_in(thread: int) -> None:
    """At its next bytecode."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(PreparationEnded))
