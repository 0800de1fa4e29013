"""Decides which thread measures, and interrupts the user's code on the main thread: at SIGTERM, and after a deadline.

One thread measures at a time: torch has one profiler per process, and two trainings at once slow each other down.

SIGTERM (`scancel`, a time limit, an eviction) first ends the run, then does what it would have done without gpulab. A
handler of the user's code, set before the run or within it, is called after the run is stored. Without such a handler
the signal ends the process.

Python calls a handler between two bytecodes, and a rank that waits in a collective may never reach the next bytecode.
So a thread also waits for the signal, at Python's wakeup descriptor, unless other code uses the descriptor.

torch's profiler can only be stopped by the thread that started it, and pure tensor code makes no marks. CPython has one
way to make that thread call something without a signal, a trace function or an exception in the user's code: a pending
call, which the main thread makes between two bytecodes. A thread other than the main one cannot be reached in this way.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from gpulab.errors import UsageError
from gpulab.user_code import within_gpulab

if TYPE_CHECKING:
    from gpulab.run import Outcome

BUSY = (
    "Another run is being measured in this process, on the thread {name!r}: wait for its end, or stop it. "
    "Two at once would slow each other down."
)

_owners: list[threading.Thread] = []  # one entry for each run under way; all living entries are the same thread
_lock = threading.Lock()
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


def measures_here() -> bool:
    """Whether a run is under way on this thread."""
    return threading.current_thread() in _owners


@contextmanager
def measuring() -> Iterator[None]:
    """Measure on this thread, possibly within another run of it. Raises UsageError if another thread measures."""
    me = threading.current_thread()
    with _lock:
        _owners[:] = [owner for owner in _owners if owner.is_alive()]
        other = next((owner for owner in _owners if owner is not me), None)
        if other is not None:
            raise UsageError(BUSY.format(name=other.name))
        _owners.append(me)
    try:
        yield
    finally:
        with _lock:
            if me in _owners:
                _owners.remove(me)


# -- the end of a run amid the user's code -----------------------------------------------------------------------------


class StopRun(BaseException):
    """Ends the user's code at a step boundary. It is no Exception, so that `except Exception` lets it pass."""

    def __init__(self, capture: object) -> None:
        super().__init__()
        self.capture = capture


def stop_behind(error: BaseException | None) -> StopRun | None:
    """The StopRun that ended the code: the error itself, or a StopRun that the error has replaced.

    A library may fail while it cleans up after the StopRun.
    """
    while isinstance(error, Exception):
        error = error.__context__
    return error if isinstance(error, StopRun) else None


def outcome_of(error: BaseException | None) -> tuple[Outcome, str]:
    """The outcome of code that raised this error, and the error in words."""
    stop = stop_behind(error)
    if error is None or error is stop:
        return ("completed" if error is None else "stopped"), ""
    words = "".join(traceback.format_exception_only(error)).strip()
    if stop is not None:
        return "stopped", words
    if isinstance(error, SystemExit) and not error.code:
        return "completed", words
    return ("interrupted" if isinstance(error, KeyboardInterrupt) else "failed"), words


def inside_generator(outside: frozenset[FrameType]) -> bool:
    """Whether a generator runs between the caller and the frames `outside`: an exception here would end the generator.

    `batches = cycle(loader)` in one cell and `next(batches)` in the next is common, and so is a loader within `tqdm`.
    The generator of the earlier cell would then yield nothing more.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame not in outside:
        if frame.f_code.co_flags & _GENERATORS:
            return True
        frame = frame.f_back
    return False


# -- SIGTERM -----------------------------------------------------------------------------------------------------------

SIGNAL = signal.SIGTERM
WORDS = "SIGTERM"
# How long the current step may go on: half of what Slurm (KillWait), Kubernetes and torchrun wait before SIGKILL.
GRACE_S = 15.0
ANSWER_S = 2.0  # by then Python has called a handler, if it can
_SET, _GET = signal.signal, signal.getsignal
RETRY_S = 0.1  # between attempts of a deadline to call
_END = b"\0"  # ends gpulab's own thread; every other byte is the number of a signal


class Terminations:
    """Handles SIGTERM during a run, on the main thread. `soon` is called at the first signal, `at_once` at the next.

    `notify` is called at once on another thread, and again when no step has ended for `GRACE_S`. Then the process gets
    another signal; if it does not react and the user's code has no handler, it ends as it would have without gpulab.
    """

    def __init__(
        self, soon: Callable[[], None], at_once: Callable[[], None], notify: Callable[[], None] = lambda: None
    ) -> None:
        self._soon = soon
        self._at_once = at_once
        self._notify = notify
        self._theirs: Any = None
        self._functions: tuple[Any, Any] = (_SET, _GET)  # `signal.signal` and `getsignal` before the run
        self._begun = False
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._patient = threading.Event()  # the run is being finished
        self.count = 0  # of signals

    def begin(self) -> None:
        """Handle the signal. Does nothing outside the main thread, or if the process ignores the signal."""
        if threading.current_thread() is not threading.main_thread():
            return
        theirs = _GET(SIGNAL)
        if theirs is None or theirs is signal.SIG_IGN:
            return
        self._theirs, self._begun = theirs, True
        self._functions = signal.signal, signal.getsignal
        _SET(SIGNAL, self._handle)
        vars(signal).update(signal=self._signal, getsignal=self._getsignal)
        self._listen()
        _listening.append(weakref.ref(self))

    def end(self) -> None:
        """Restore the handlers of the user's code. May be called twice."""
        if not self._begun:
            return
        self._begun = False
        if signal.signal == self._signal:
            signal.signal, signal.getsignal = self._functions
        if _GET(SIGNAL) == self._handle:
            _SET(SIGNAL, self._theirs)
        self._listen_no_more()
        _listening[:] = [ref for ref in _listening if ref() not in (None, self)]

    def be_patient(self) -> None:
        """The run is being finished, which may take long: do not end the process meanwhile."""
        self._patient.set()

    def deliver(self) -> None:
        """After `end`: send the signal again, for its effect without gpulab. Does nothing if none came."""
        count, self.count = self.count, 0
        if count:
            os.kill(os.getpid(), SIGNAL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._theirs is signal.SIG_IGN:
            return
        self.count += 1
        (self._soon if self.count == 1 else self._at_once)()

    # -- while Python cannot call a handler ------------------------------------------------------------------------

    def _listen(self) -> None:
        if sys.platform == "win32":
            return
        reads, writes = self._pipe = os.pipe()
        os.set_blocking(writes, False)
        before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        if before != -1:  # the descriptor of asyncio or of an enclosing run
            signal.set_wakeup_fd(before)
            self._close_pipe()
            return
        self._thread = threading.Thread(target=self._await, args=(reads,), name="gpulab-terminations", daemon=True)
        self._thread.start()

    def _listen_no_more(self) -> None:
        if self._pipe is None:
            return
        with suppress(ValueError):  # in a child that another thread has forked
            present = signal.set_wakeup_fd(-1)
            if present not in (-1, self._pipe[1]):  # the user's code has set its own
                signal.set_wakeup_fd(present)
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():  # a forked child does not have it
            self._patient.set()
            os.write(self._pipe[1], _END)
            thread.join()
        self._close_pipe()

    def _close_pipe(self) -> None:
        pipe, self._pipe = self._pipe, None
        for end in pipe or ():
            os.close(end)

    def _await(self, pipe: int) -> None:
        """Wait for signals, on gpulab's own thread."""
        while (numbers := os.read(pipe, 64)) and _END not in numbers:
            if int(SIGNAL) not in numbers or self._theirs is signal.SIG_IGN:
                continue
            self._notify()
            if not self._patient.wait(GRACE_S):
                self._overdue()
            return

    def _overdue(self) -> None:
        """Act when no step has ended in time."""
        self._notify()
        count, until_s = self.count, time.monotonic() + ANSWER_S
        os.kill(os.getpid(), SIGNAL)
        while time.monotonic() < until_s:
            if self.count > count or self._patient.is_set():
                return  # the run is being written
            time.sleep(0.05)
        if self._theirs == signal.SIG_DFL and not self._patient.is_set():
            ctypes.CDLL(None).signal(int(SIGNAL), ctypes.c_void_p(None))  # Python's needs the main thread
            os.kill(os.getpid(), SIGNAL)

    # -- signals as the user's code sees them ----------------------------------------------------------------------

    def _signal(self, number: int, handler: Any) -> Any:
        """Replaces `signal.signal`: a handler that the user's code sets is called once the run is stored."""
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
    """Stop handling signals in a forked child, such as a DataLoader worker: no run is measured there."""
    for ref in reversed(_listening):
        if (terminations := ref()) is not None:
            terminations.end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


class Deadline:
    """Calls `due` on the main thread after a time, even if the user's code makes no marks.

    From `after_s` on, or once `full` returns True, it calls `due` on the main thread, again and again until it is
    cancelled. It never interrupts gpulab's own code, whose state `due` may change, but tries again a little later. A
    deadline created outside the main thread calls `otherwise` once instead, on a thread of its own.
    """

    def __init__(
        self,
        after_s: float,
        due: Callable[[], None],
        otherwise: Callable[[], None],
        full: Callable[[], bool] | None = None,
    ) -> None:
        self._after_s = after_s
        self._due = due
        self._full = full
        self._otherwise = otherwise
        self._reachable = threading.current_thread() is threading.main_thread()
        self._over = threading.Event()
        self._is_pending = False
        self._started = False
        self._turn = threading.RLock()  # Stop and the end of the run come from different threads
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._wait, name="gpulab-deadline", daemon=True)

    def start(self) -> None:
        with self._turn:
            if not self._started and not self._over.is_set():
                self._started = True
                self._thread.start()

    def cancel(self) -> None:
        """Stop calling, and end the thread. Must not be called from `otherwise`."""
        self._over.set()
        with self._turn:
            runs = self._thread.is_alive()
        if runs:
            self._thread.join()

    def _wait(self) -> None:
        until_s, wait_s = time.monotonic() + self._after_s, RETRY_S if self._full is not None else self._after_s
        while not self._over.wait(wait_s):
            if self._full is not None and not self._full() and time.monotonic() < until_s:
                continue
            if not self._reachable:
                return self._otherwise()
            if not self._is_pending:
                self._is_pending = _on_main_thread(self._call_due)
            wait_s = RETRY_S

    def _call_due(self) -> None:
        self._is_pending = False
        if self._over.is_set() or os.getpid() != self._process:  # a forked worker inherits pending calls
            return
        caller = sys._getframe().f_back  # the frame of `_PendingCall.__bool__`
        if not within_gpulab(caller.f_back if caller is not None else None):
            self._due()


_waiting: set[_PendingCall] = set()  # the interpreter itself keeps no reference


class _PendingCall:
    """An object whose truth value the main thread takes between two bytecodes; exceptions (interrupts) propagate."""

    def __init__(self, task: Callable[[], None]) -> None:
        self._task = task

    def __bool__(self) -> bool:
        _waiting.discard(self)
        self._task()
        return False


def _on_main_thread(task: Callable[[], None]) -> bool:
    """Have the main thread call `task` soon; False if its queue is full."""
    add = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.py_object)(
        ("Py_AddPendingCall", ctypes.pythonapi)  # a separate prototype, so that no other code's changes
    )  # PyObject_IsTrue has the signature of a pending call
    caller = _PendingCall(task)
    _waiting.add(caller)
    if add(ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, ctypes.c_void_p), caller) == 0:
        return True
    _waiting.discard(caller)  # the interpreter's queue is full
    return False
