"""Runs the user's code on a thread of its own as if it were on the main one, with its prints kept apart.

A notebook's main thread is then free, and its widgets answer while training goes on. torch keeps some of what a user
sets per thread: that is carried over. What the code writes would be lost or misplaced by ipykernel 7: it is collected.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Protocol, cast

from gpulab.tuning.wrapped_code import Wrapped

KEPT_CHARACTERS = 20_000  # of what the code wrote: the last


@dataclass(slots=True)
class Written:
    """The end of what some code wrote."""

    text: str = ""
    cut: bool = False  # its beginning was dropped

    def write(self, text: str) -> int:
        """Add to it."""
        whole = self.text + text
        self.cut = self.cut or len(whole) > KEPT_CHARACTERS
        self.text = whole[-KEPT_CHARACTERS:]
        return len(text)


@dataclass(frozen=True, slots=True)
class Apart(Wrapped):
    """Code whose output goes to `written`, or nowhere when it is to be quiet. The rest of the process prints on."""

    written: Written = field(default_factory=Written)

    def run(self, *, quiet: bool) -> object:
        """Run it; its exceptions pass. Its own way of being quiet would silence all threads."""
        with written_apart(Written() if quiet else self.written):
            return self.code.run(quiet=False)


class _Stream:
    """Stands in for a standard stream: what this thread of this process writes goes elsewhere."""

    def __init__(self, stream: Any, elsewhere: Written) -> None:
        self._stream = stream
        self._elsewhere = elsewhere
        self._thread = get_ident()
        self._process = os.getpid()
        self.over = False

    def write(self, text: str) -> int:
        ours = not self.over and get_ident() == self._thread and os.getpid() == self._process
        return self._elsewhere.write(text) if ours else int(self._stream.write(text) or 0)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def written_apart(elsewhere: Written) -> Iterator[None]:
    """What this thread prints or displays inside goes to `elsewhere`; all other threads print as before."""
    with ExitStack() as undo:
        for name in ("stdout", "stderr"):
            undo.enter_context(_stream_replaced(name, elsewhere))
        undo.enter_context(_displays_taken(elsewhere))
        yield


@contextmanager
def _stream_replaced(name: str, elsewhere: Written) -> Iterator[None]:
    stream = getattr(sys, name)
    if stream is None:
        yield
        return
    ours = _Stream(stream, elsewhere)
    setattr(sys, name, ours)
    try:
        yield
    finally:
        ours.over = True  # another thread may have put something over it, and will put it back
        if getattr(sys, name) is ours:
            setattr(sys, name, stream)


class _Publisher(Protocol):
    """ipykernel's display publisher: its hooks are each thread's own."""

    def register_hook(self, hook: Callable[[dict[str, Any]], None]) -> None: ...
    def unregister_hook(self, hook: Callable[[dict[str, Any]], None]) -> bool: ...


@contextmanager
def _displays_taken(elsewhere: Written) -> Iterator[None]:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    publisher = getattr(shell, "display_pub", None)
    if not hasattr(publisher, "register_hook"):
        yield
        return

    def take(message: dict[str, Any]) -> None:
        text = message.get("content", {}).get("data", {}).get("text/plain")
        if text:
            elsewhere.write(f"{text}\n")

    known = cast("_Publisher", publisher)
    known.register_hook(take)
    try:
        yield
    finally:
        known.unregister_hook(take)


class MainThread:
    """Runs tasks on the main thread, for those on other threads: at once where its event loop is free.

    Where it has no event loop, or is busy, they wait for `catch_up`. With ipykernel 7 and JupyterLab 4.6 some clicks
    arrive on a subshell's thread, others on the main one.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._loop = _main_loop()
        self._context = contextvars.copy_context() if self.here else None

    @property
    def here(self) -> bool:
        """Whether this is called on it."""
        return threading.current_thread() is threading.main_thread()

    def call(self, task: Callable[[], None]) -> None:
        """Run it there: now if this is that thread."""
        if self.here:
            task()
            return
        self._waiting.append(task)
        if self._loop is not None:
            with suppress(RuntimeError):  # the kernel is shutting down
                self._loop.call_soon_threadsafe(self.catch_up, context=self._context)

    def later(self, seconds: float, task: Callable[[], None]) -> None:
        """Run it there after a while; at once where there is no event loop to wait for."""
        if self._loop is None:
            task()
        else:
            self._loop.call_later(seconds, task)

    def catch_up(self) -> None:
        """Run what waits, in order."""
        while self._waiting:
            self._waiting.popleft()()


def _main_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of a kernel's main thread; else the one that runs here, if here is the main thread."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    loop = getattr(getattr(getattr(shell, "kernel", None), "io_loop", None), "asyncio_loop", None)
    if isinstance(loop, asyncio.AbstractEventLoop):
        return loop
    if threading.current_thread() is not threading.main_thread():
        return None
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Thread:
    """A task on a daemon thread of its own. `begin` is called where the user's own code usually runs."""

    def __init__(self, task: Callable[[], None], name: str) -> None:
        self._task = task
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def begin(self) -> None:
        """Start it with what this thread has set for itself: context variables, and torch's settings per thread."""
        self._context = contextvars.copy_context()
        self._as_here = torch_settings()
        self._thread.start()

    def _run(self) -> None:
        def task() -> None:
            self._as_here()
            self._task()

        self._context.run(task)

    @property
    def alive(self) -> bool:
        """Whether it goes on."""
        return self._thread.is_alive()

    @property
    def here(self) -> bool:
        """Whether this is called on it."""
        return threading.current_thread() is self._thread

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for its end."""
        self._thread.join(timeout_s)


def torch_settings() -> Callable[[], None]:
    """What torch keeps for this thread only; call the result on another thread to set it there."""
    torch = sys.modules.get("torch")
    if torch is None:
        return lambda: None
    grad, threads, device = torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_device()
    gpu: int | None = None
    with suppress(RuntimeError):  # an error of the GPU stays: the code may do without it
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    autocast: dict[str, tuple[bool, Any]] = {}
    for kind in ("cpu", "cuda"):
        with suppress(Exception):  # a build without it
            autocast[kind] = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def set_them() -> None:
        torch.set_grad_enabled(grad)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        if gpu is not None:
            torch.cuda.set_device(gpu)
        for kind, (on, dtype) in autocast.items():
            if on:
                torch.set_autocast_enabled(kind, True)
                torch.set_autocast_dtype(kind, dtype)

    return set_them


__all__ = ["Apart", "MainThread", "Thread", "Written", "torch_settings", "written_apart"]
