"""End something on the main thread after a time, also where the user's code gives no mark: pure tensor code.

torch's profiler can only be stopped by the thread that started it. CPython offers one way to have that thread call
something without a signal, a trace function or an exception in the user's code: a pending call, which the main thread
makes between two bytecodes. Code that trains on another thread cannot be reached so.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable

from gpulab.user_code import within_gpulab

RETRY_S = 0.1

_waiting: set[_Knock] = set()  # the interpreter keeps no reference of its own


class Deadline:
    """From `after_s` on calls `due` on the main thread, again and again until it is cancelled.

    Never within a call of gpulab's own, whose state `due` may change: there it tries again a little later. Started on
    another thread than the main one, it calls `otherwise` once instead, on a third.
    """

    def __init__(self, after_s: float, due: Callable[[], None], otherwise: Callable[[], None]) -> None:
        self._after_s = after_s
        self._due = due
        self._otherwise = otherwise
        self._reachable = threading.current_thread() is threading.main_thread()
        self._over = threading.Event()
        self._knocking = False
        self._started = False
        self._turn = threading.RLock()  # Stop comes from another thread than the end of the run
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._wait, name="gpulab-deadline", daemon=True)

    def start(self) -> None:
        with self._turn:
            if not self._started and not self._over.is_set():
                self._started = True
                self._thread.start()

    def cancel(self) -> None:
        """Call no more, leave no thread. Not from `otherwise`."""
        self._over.set()
        with self._turn:
            runs = self._thread.is_alive()
        if runs:
            self._thread.join()

    def _wait(self) -> None:
        wait_s = self._after_s
        while not self._over.wait(wait_s):
            if not self._reachable:
                return self._otherwise()
            if not self._knocking:
                self._knocking = _on_main_thread(self._knocked)
            wait_s = RETRY_S

    def _knocked(self) -> None:
        self._knocking = False
        if self._over.is_set() or os.getpid() != self._process:  # a forked worker inherits what is pending
            return
        knock = sys._getframe().f_back  # the frame of `_Knock.__bool__`
        if not within_gpulab(knock.f_back if knock is not None else None):
            self._due()


class _Knock:
    """The main thread asks for its truth between two bytecodes. What is raised meanwhile, an interrupt, it raises."""

    def __init__(self, task: Callable[[], None]) -> None:
        self._task = task

    def __bool__(self) -> bool:
        _waiting.discard(self)
        self._task()
        return False


def _on_main_thread(task: Callable[[], None]) -> bool:
    """Whether the main thread will call `task` soon. PyObject_IsTrue has the signature of a pending call."""
    add = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.py_object)(
        ("Py_AddPendingCall", ctypes.pythonapi)  # a prototype of our own: nobody else's is changed
    )
    knock = _Knock(task)
    _waiting.add(knock)
    if add(ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, ctypes.c_void_p), knock) == 0:
        return True
    _waiting.discard(knock)  # the interpreter's queue is full
    return False
