"""The bench's place in a notebook: its widget, and before it the same as HTML, which is saved.

A widget in a saved notebook is an error message without its kernel. The HTML stands in its place then; while the widget
lives, its script hides the HTML. The widget may be renewed from any thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from html import escape
from threading import get_ident
from typing import Any

from msgspec import Struct

from gpulab.tuning import cell_code
from gpulab.views.html import static
from gpulab.views.live_view import WIDGET_VIEW
from gpulab.views.progress import Status
from gpulab.views.widgets import Renewed, widget_class

# The front end writes its message as the only text of the widget's place, which then holds no element.
_DEAD = "div.jupyter-widgets:not(:has(*))"  # no button, which has no element inside either
_NO_ERROR = f"<style>.jp-OutputArea-child:has(.gpulab-twin)+.jp-OutputArea-child {_DEAD}{{display:none}}</style>"


class BenchOutput:
    """Two outputs of the cell that showed the bench: it as HTML, and its widget."""

    def __init__(self) -> None:
        self._twin: Any = None
        self._widget: Any = None

    def offer(self, html: str, text: str) -> None:
        """Display what opens the bench, with room for it below."""
        self._make_room()
        self._twin.update({"text/html": html, "text/plain": text}, raw=True)

    def show(self, root: Any, html: str, text: str) -> None:
        """Display the bench; shown again, it takes the place of what was shown before."""
        self._make_room()
        self.save(root.key, html, text)
        view = {WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": root.model_id}, "text/plain": ""}
        self._widget.update(view, raw=True)

    def save(self, key: str, html: str, text: str) -> None:
        """Put the HTML that a saved notebook shows in its place."""
        if self._twin is not None:
            twin = f'{_NO_ERROR}<div class="gpulab-twin gpulab-twin-{escape(key)}">{html}</div>'
            self._twin.update({"text/html": twin, "text/plain": text}, raw=True)

    def close(self, html: str, text: str) -> None:
        """Leave the HTML alone."""
        if self._twin is not None:
            self._twin.update({"text/html": html, "text/plain": text}, raw=True)
            self._widget.update({"text/plain": ""}, raw=True)

    def _make_room(self) -> None:
        from IPython.display import display

        if self._twin is None:
            self._twin, self._widget = (
                display({"text/plain": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )


KEPT_CHARACTERS = 20_000  # of what the code wrote: the last


class KeptPrints(Struct):
    """The end of what some code wrote."""

    text: str = ""
    cut: bool = False  # its beginning was dropped

    def write(self, text: str) -> int:
        whole = self.text + text
        self.cut = self.cut or len(whole) > KEPT_CHARACTERS
        self.text = whole[-KEPT_CHARACTERS:]
        return len(text)


class _Stream:
    """Stands in for a standard stream: what this thread of this process writes is kept."""

    def __init__(self, stream: Any, prints: KeptPrints) -> None:
        self._stream = stream
        self._prints = prints
        self._thread = get_ident()
        self._process = os.getpid()
        self.over = False

    def write(self, text: str) -> int:
        ours = not self.over and get_ident() == self._thread and os.getpid() == self._process
        return self._prints.write(text) if ours else int(self._stream.write(text) or 0)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def prints_kept(prints: KeptPrints) -> Iterator[None]:
    """What this thread prints or displays inside is kept; all other threads print as before."""
    with ExitStack() as undo:
        for name in ("stdout", "stderr"):
            undo.enter_context(_stream_replaced(name, prints))
        undo.enter_context(_displays_kept(prints))
        yield


@contextmanager
def _stream_replaced(name: str, prints: KeptPrints) -> Iterator[None]:
    stream = getattr(sys, name)
    if stream is None:
        yield
        return
    ours = _Stream(stream, prints)
    setattr(sys, name, ours)
    try:
        yield
    finally:
        ours.over = True  # the cell may have put something over it, which goes on writing to it
        if getattr(sys, name) is ours:
            setattr(sys, name, stream)


@contextmanager
def _displays_kept(prints: KeptPrints) -> Iterator[None]:
    """By a hook of ipykernel's display publisher, which is this thread's own."""
    publisher: Any = getattr(cell_code.shell(), "display_pub", None)
    if not hasattr(publisher, "register_hook"):
        yield
        return

    def keep(message: dict[str, Any]) -> None:
        text = message.get("content", {}).get("data", {}).get("text/plain")
        if text:
            prints.write(f"{text}\n")

    publisher.register_hook(keep)
    try:
        yield
    finally:
        publisher.unregister_hook(keep)


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


Heard = Callable[[str, Mapping[str, Any]], None]


class BenchWidget(Renewed):
    """`root` is displayed. `heard` is called with what a click asks for, and with its words."""

    def __init__(self, key: str, run_key: str, cell: str, code: str, heard: Heard) -> None:
        root = _widget_class()(
            key=key,
            run_key=run_key,
            cell=cell,
            code=code,
            css=static("rows.css") + static("bench.css"),
            status=Status().sent(),
        )
        super().__init__(root)
        self.root.on_msg(lambda _widget, content, _buffers: heard(str(content.get("do", "")), content))

    @property
    def marks(self) -> list[str]:
        return list(self.root.marks)


@cache
def _widget_class() -> Callable[..., Any]:
    """Of frontend/src/bench.js. `css`, not `style`: front ends take that for a widget of ipywidgets."""
    texts = dict.fromkeys(("key", "run_key", "cell", "code", "css", "unexpected", "table", "detail", "prints"), "")
    return widget_class("bench.js", **texts, toggles=[], marks=[], charts=[], status={}, edit={})
