"""Runs what a click asks for on the main thread, and lets an interrupt end it there.

With ipykernel 7 and JupyterLab 4.6 some clicks arrive on a subshell's thread, others on the main one.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gpulab.tuning import cell_code


class MainThread:
    """Runs tasks on the main thread, for those on other threads: when its event loop is free."""

    def __init__(self) -> None:
        self._loop = _main_loop()
        self._context = contextvars.copy_context() if _on_main_thread() else None

    def call(self, task: Callable[[], None]) -> None:
        """Run it there: now if this is that thread, or where it has no event loop."""
        if self._loop is None or _on_main_thread():
            task()
            return
        with suppress(RuntimeError):  # the kernel is shutting down
            self._loop.call_soon_threadsafe(task, context=self._context)

    def later(self, seconds: float, task: Callable[[], None]) -> None:
        """Run it there after a while; at once where there is no event loop to wait for."""
        if self._loop is None:
            task()
        else:
            self._loop.call_later(seconds, task)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _main_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of a kernel's main thread; else the one that runs here, if here is the main thread."""
    kernel = getattr(cell_code.shell(), "kernel", None)
    loop = getattr(getattr(kernel, "io_loop", None), "asyncio_loop", None)
    if isinstance(loop, asyncio.AbstractEventLoop):
        return loop
    with suppress(RuntimeError):
        return asyncio.get_running_loop() if _on_main_thread() else None
    return None


@contextmanager
def interruptible() -> Iterator[None]:
    """The notebook's own stop button is heard inside: ipykernel ignores interrupts while it handles no message."""
    if not _on_main_thread() or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
