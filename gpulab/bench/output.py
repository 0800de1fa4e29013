"""The bench in a notebook: the texts below its table, its widget, and the same content as HTML, which is saved.

Without its kernel a widget in a saved notebook is an error message; then the HTML is shown instead. While the widget is
alive, its script hides the HTML. The widget may be updated from any thread.
"""

from __future__ import annotations

import asyncio
import builtins
import contextvars
import dataclasses
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from html import escape
from threading import get_ident
from typing import Any

from msgspec import Struct

from gpulab.analysis.facts import Facts
from gpulab.api.reading import report
from gpulab.errors import GpulabError
from gpulab.tuning import cell_code
from gpulab.tuning.bench import Bench, Row, between
from gpulab.tuning.code import Code
from gpulab.user_code import hide_gpulabs_frames
from gpulab.views import bench as view
from gpulab.views import side_by_side
from gpulab.views.page import static
from gpulab.views.progress import Status
from gpulab.views.widgets import Output, Renewed, widget_class

# The front end writes its error message as plain text into the widget's container, which then holds no element.
_DEAD = "div.jupyter-widgets:not(:has(*))"  # no match for a button, which has no child element either
_NO_ERROR = f"<style>.jp-OutputArea-child:has(.gpulab-twin)+.jp-OutputArea-child {_DEAD}{{display:none}}</style>"


class BenchOutput:
    """Two outputs of the cell that showed the bench: the HTML and the widget."""

    def __init__(self) -> None:
        self._twin, self._widget = Output(), Output()

    def offer(self, html: str, text: str) -> None:
        """Display the buttons that open the bench, with room for the bench below."""
        self._make_room()
        self._twin.show({"text/html": html, "text/plain": text})

    def show(self, root: Any, html: str, text: str) -> None:
        """Display the bench, in place of what was shown before."""
        self._make_room()
        self.save(root.key, html, text)
        self._widget.show_widget(root, "")

    def save(self, key: str, html: str, text: str) -> None:
        """Update the HTML that a saved notebook shows."""
        if self._twin:
            twin = f'{_NO_ERROR}<div class="gpulab-twin gpulab-twin-{escape(key)}">{html}</div>'
            self._twin.show({"text/html": twin, "text/plain": text})

    def close(self, html: str, text: str) -> None:
        """Remove the widget; the HTML stays."""
        if self._twin:
            self._twin.show({"text/html": html, "text/plain": text})
            self._widget.show({"text/plain": ""})

    def _make_room(self) -> None:
        for output in (self._twin, self._widget):
            if not output:
                output.show({"text/plain": ""})


MOST_CHARACTERS = 20_000  # the last ones of the code's output


class Prints(Struct):
    """The end of the output of some code."""

    text: str = ""
    cut: bool = False  # its beginning was dropped

    def write(self, text: str) -> int:
        whole = self.text + text
        self.cut = self.cut or len(whole) > MOST_CHARACTERS
        self.text = whole[-MOST_CHARACTERS:]
        return len(text)

    @property
    def html(self) -> str:
        """A folded section; empty if nothing was written."""
        if not self.text.strip():
            return ""
        text = escape(("…" if self.cut else "") + self.text.rstrip())
        return (
            '<details style="margin:8px 0;font-size:13px"><summary>What the cell printed</summary>'
            f'<pre style="font-size:12px;white-space:pre-wrap;margin:4px 0">{text}</pre></details>'
        )


class _Stream:
    """Replaces a standard stream: collects the output of this thread of this process."""

    def __init__(self, stream: Any, prints: Prints) -> None:
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
def collecting(prints: Prints) -> Iterator[None]:
    """Collects what this thread prints or displays inside; all other threads print as before.

    Displays are collected by a hook of ipykernel's display publisher, which is specific to this thread.
    """
    publisher: Any = getattr(cell_code.shell(), "display_pub", None)

    def collect(message: dict[str, Any]) -> None:
        text = message.get("content", {}).get("data", {}).get("text/plain")
        if text:
            prints.write(f"{text}\n")

    with ExitStack() as undo:
        for name in ("stdout", "stderr"):
            undo.enter_context(_stream_replaced(name, prints))
        if hasattr(publisher, "register_hook"):
            publisher.register_hook(collect)
            undo.callback(publisher.unregister_hook, collect)
        yield


@contextmanager
def _stream_replaced(name: str, prints: Prints) -> Iterator[None]:
    stream = getattr(sys, name)
    if stream is None:
        yield
        return
    ours = _Stream(stream, prints)
    setattr(sys, name, ours)
    try:
        yield
    finally:
        ours.over = True  # the cell may have wrapped it, and the wrapper still writes to it
        if getattr(sys, name) is ours:
            setattr(sys, name, stream)


class MainThread:
    """Runs tasks from other threads on the main thread, when its event loop is free."""

    def __init__(self) -> None:
        self._loop = _main_loop()
        self._context = contextvars.copy_context() if _on_main_thread() else None

    def call(self, task: Callable[[], None]) -> None:
        """Run the task on the main thread; at once if this is that thread, or it has no event loop."""
        if self._loop is None or _on_main_thread():
            task()
            return
        with suppress(RuntimeError):  # the kernel is shutting down
            self._loop.call_soon_threadsafe(task, context=self._context)

    def later(self, seconds: float, task: Callable[[], None]) -> None:
        """Run the task on the main thread after some seconds; at once if there is no event loop."""
        if self._loop is None:
            task()
        else:
            self._loop.call_later(seconds, task)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _main_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of the kernel's main thread; else the running loop, if this is the main thread."""
    kernel = getattr(cell_code.shell(), "kernel", None)
    loop = getattr(getattr(kernel, "io_loop", None), "asyncio_loop", None)
    if isinstance(loop, asyncio.AbstractEventLoop):
        return loop
    with suppress(RuntimeError):
        return asyncio.get_running_loop() if _on_main_thread() else None
    return None


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, the notebook's stop button interrupts; ipykernel ignores it while it handles no message."""
    if not _on_main_thread() or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


Receiver = Callable[[str, Mapping[str, Any]], None]


class BenchWidget(Renewed):
    """`root` is displayed. `receive` is called with the request of a click and its content."""

    def __init__(self, key: str, run_key: str, cell: str, code: str, receive: Receiver) -> None:
        root = _widget_class()(
            key=key,
            run_key=run_key,
            cell=cell,
            code=code,
            css=static("rows.css") + static("bench.css"),
            status=Status().sent(),
        )
        super().__init__(root)
        self.root.on_msg(lambda _widget, content, _buffers: receive(str(content.get("do", "")), content))

    @property
    def marks(self) -> list[str]:
        return list(self.root.marks)


@cache
def _widget_class() -> Callable[..., Any]:
    """The class for frontend/src/bench.js. `css`, not `style`: front ends expect an ipywidgets style there."""
    texts = dict.fromkeys(("key", "run_key", "cell", "code", "css", "unexpected", "table", "detail", "prints"), "")
    return widget_class("bench.js", **texts, toggles=[], marks=[], charts=[], status={}, edit={})


# messages about runs, and the parts below the table

INTERRUPTED = "Interrupted. The training state was restored."

MISSING = "The notebook had no {}: run the cells above first."


def missing_names(code: Code) -> str:
    """A sentence naming variables that the cell reads and the notebook lacks, as after a restart; empty if none."""
    names = sorted(n for n in code.variables.read if n not in code.namespace and not hasattr(builtins, n))
    return MISSING.format(", ".join(names)) if names else ""


def error_words(error: BaseException, missing: str) -> tuple[str, str]:
    """The error as a sentence, and the traceback of the user's own frames as HTML; `missing`: see `missing_names`."""
    if isinstance(error, GpulabError):
        return str(error), ""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, ""
    if isinstance(error, NameError) and error.name and error.name in missing:
        return missing, ""
    hide_gpulabs_frames(error)
    trace = escape("".join(traceback.format_exception(error)))
    words = "".join(traceback.format_exception_only(error)).strip()
    return f"The cell raised {words}", f'<pre style="font-size:12px;white-space:pre-wrap">{trace}</pre>'


def rows_words(bench: Bench, rows: Sequence[Row], stopped: bool) -> str:
    """A sentence about the measurements of these rows."""
    ids, (first, *others) = {row.id for row in rows}, view.ordered(bench)
    own = [row for row in others if row.id in ids and (row.failure or (row.speed and row.speed.ratio))]
    sentences = [side_by_side.sentence(first, row, row.speed) for row in own]
    return " ".join(["Stopped."] * stopped + sentences) or "Nothing was compared."


def first_line(cell: str) -> str:
    """The name of a cell for its user: the first line that is neither empty nor a comment."""
    lines = [line.strip() for line in cell.splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith("#")), lines[0] if lines else "a block of code")


def page(bench: Bench, code: Code, below: str) -> str:
    """The HTML that a saved notebook shows."""
    head = f'<div class="gp-benchhead"><b>Bench</b><code>{escape(first_line(code.text))}</code></div>'
    return view.static_page(bench, head, below)


def detail(
    bench: Bench, marks: Sequence[str], figures_of: Callable[[Row], Facts | None]
) -> tuple[str, list[dict[str, object]]]:
    """The report of one row, or of two side by side; and their charts as data, which get a cursor in a live bench."""
    rows = [row for mark in marks for group in view.groups(bench) for row in group if row.id == mark]
    if len(rows) == 2:
        a, b = rows
        of_a, of_b = map(figures_of, rows)
        html = side_by_side.fragment(a, b, of_a, of_b, between(a, b), bench.edit_between(a, b))
        return html, [chart.data() for chart in side_by_side.charts(a, b, of_a, of_b)]
    figures = figures_of(rows[0]) if rows else None
    if figures is None:
        return "", []
    whole = dataclasses.replace(report(figures.run), change=None)  # the row shows the effect of its settings
    return view.full_run_words(rows[0]) + whole.fragment(), []


def edit_offer(bench: Bench, row: Row | None, code: Code) -> dict[str, object]:
    """The edit that keeps a row's settings; `texts`: cell texts to which it can be or was applied."""
    if row is None:
        return {"text": ""}
    lost = [] if row in bench.own else [other.title for other in bench.rows if view.is_in(bench, other)]
    instead = f" instead of {', '.join(lost)}" if lost else ""  # it edits the earlier text
    texts = [] if code.source == "block" else [code.text, *reversed(bench.texts), row.cell]
    title, html = f"Keep {row.label}{instead}", view.edit_html(row, bench)
    return {"title": title, "html": html, "text": row.edit, "cell": row.cell, "row": row.id, "texts": texts}
