"""Lets another thread end a knob's preparation inside the user's code, such as compiling, when time is over.

A run ends at a step boundary, but code that waits for a compiler may reach none for minutes. A long preparation shows
its `status`.
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
    """Raised inside `endable`. No subclass of Exception, so that a compiler's own handlers let it pass."""


class _Current(Struct):
    """The current preparation (at most one): its thread, and the module in whose functions it may be ended."""

    thread: int | None = None
    module: str = ""
    ending: bool = False  # `end` was called for it


class Status(Struct):
    """What is being prepared, in words for the waiting user; empty: nothing. Read from any thread."""

    words: str = ""


status = Status()
_MOST_BYTECODES = 1_000_000
_TRIES, _BETWEEN_TRIES_S = 100, 0.01

_current = _Current()
_lock = threading.Lock()  # held by `end`; the preparing thread takes it only if `ending` is set


class endable:
    """Inside, `end` raises PreparationEnded on this thread while a function of `module` is running there.

    Cheap, because it encloses every call of a compiled module: each call may compile again.
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
                _receive(self._thread)  # consume an exception that was not delivered yet
                _current.ending = False


def end() -> None:
    """End the current preparation, if any. From any thread."""
    for _ in range(_TRIES):
        with _lock:
            _current.ending = True  # set before `thread` is read: so one of the two threads sees the other
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
    """Whether Python prints and drops exceptions of this code: finalizers and GC callbacks."""
    callbacks = (*gc.callbacks, sys.unraisablehook)
    return code.co_name == "__del__" or any(code is getattr(c, "__code__", None) for c in callbacks)


def _receive(thread: int) -> None:
    """Let this thread raise its pending exception, and swallow it.

    If the exception is only cancelled, CPython 3.11 keeps polling for it and hangs under a profile function.
    """
    try:
        _raise_in(thread)
        for _ in range(_MOST_BYTECODES):
            pass
    except PreparationEnded:
        pass


def _raise_in(thread: int) -> None:
    """Raise PreparationEnded in the thread at its next bytecode."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(PreparationEnded))
