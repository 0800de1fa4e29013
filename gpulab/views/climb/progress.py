"""A climb while it goes on: the ladder so far, what runs right now, and a Stop button that is heard meanwhile.

The climb runs on the main thread, where a click would wait for its end: the button asks on the kernel's control
channel (gpulab.views.running.stop_message). The notebook's own stop button ends it as well.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from gpulab.diagnosis.headline import Headline
from gpulab.tuning.climb.record import Climb
from gpulab.tuning.plan import Progress
from gpulab.views import html
from gpulab.views.climb.attempts import ladder, result
from gpulab.views.climb.climb import Climbed
from gpulab.views.running.display import in_notebook
from gpulab.views.running.live import WIDGET_VIEW
from gpulab.views.running.progress import RENEWED_S, words
from gpulab.views.running.stop_message import accept_stop
from gpulab.views.running.widgets import close

HINT = "End the climb at the next step; what was kept so far is shown"
STOPPED_BY = "To end it: the Stop button above, or the notebook's own. What the cell trains is put back."


class Climbing:
    """Shows the ladder while its block runs, then the result in its place. `stop` is what the button calls."""

    def __init__(self, stop: Callable[[], None], *, show: bool = True) -> None:
        self._stop = stop
        self._show = show
        self._notebook = show and in_notebook()
        self._handle: Any = None  # of the ladder
        self._button_handle: Any = None
        self._button: Any = None
        self._refuse_stop: Callable[[], None] = lambda: None
        self._found: Climb | None = None
        self._told_rungs = 0
        self._shown_at = 0.0
        self._written = 0

    def __enter__(self) -> Self:
        if self._notebook:
            from IPython.display import display

            self._show_button()
            self._handle = display({"text/plain": "gpulab: …"}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        return self

    def _show_button(self) -> None:
        """Without ipywidgets or anywidget the notebook's own stop button is there."""
        from IPython.display import display

        key = uuid.uuid4().hex
        with suppress(Exception):
            from gpulab.views.running.stop_button import control_stop_button

            button = self._button = control_stop_button(key, HINT, self._stop)
            button.disabled, button.button_style = False, "warning"
            view = {WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": button.model_id}}
            shell = sys.modules["IPython"].get_ipython()
            self._refuse_stop = accept_stop(shell.kernel, key, self._stop)
            self._button_handle = display(  # type: ignore[no-untyped-call]
                {**view, "text/plain": STOPPED_BY}, raw=True, display_id=True
            )

    def tell(self, progress: Progress) -> None:
        """Say what runs."""
        if not self._show or time.monotonic() - self._shown_at < RENEWED_S:
            return
        self._shown_at = time.monotonic()
        with suppress(Exception):  # a view that fails must not end the climb
            if self._handle is not None:
                self._draw(words(progress))
            elif sys.stderr.isatty():
                line = f"gpulab: {words(progress)}"
                sys.stderr.write("\r" + line.ljust(self._written))
                sys.stderr.flush()
                self._written = len(line)

    def told(self, found: Climb) -> None:
        """Show the ladder so far; in a terminal a line for each new try."""
        if not self._show or found.written is None:
            return
        with suppress(Exception):
            self._found = found
            if self._handle is not None:
                self._draw("…")
                return
            self._clear_line()
            for rung in found.rungs[self._told_rungs :]:
                sys.stdout.write(f"gpulab: {rung.label}: {result(rung)}\n")
            self._told_rungs = len(found.rungs)

    def _draw(self, line: str) -> None:
        found = self._found
        sections = (ladder(found),) if found is not None and found.written is not None else ()
        number = len(found.rungs) + 1 if sections and found is not None else 0
        what = f"Climbing, try {number}: {line}" if number else f"Measuring the cell as written: {line}"
        shown = html.fragment(Headline("climbing", what, STOPPED_BY, "unknown"), sections)
        self._handle.update({"text/html": shown, "text/plain": what}, raw=True)

    def _clear_line(self) -> None:
        if self._written:
            sys.stderr.write("\r" + " " * self._written + "\r")
            self._written = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._refuse_stop()
        with suppress(Exception):
            self._clear_line()
            if self._button_handle is not None:  # a widget in a saved notebook is an error message
                self._button_handle.update({"text/plain": "", "text/html": ""}, raw=True)
            if self._button is not None:
                close(self._button)
            if self._handle is not None and error is not None:
                self._handle.update({"text/plain": ""}, raw=True)

    def show(self, climbed: Climbed) -> None:
        """Put the result where the progress was."""
        if not self._show:
            return
        if self._handle is None:
            sys.stdout.write(climbed.text() + "\n")
        else:
            self._handle.update(climbed.bundle(), raw=True)

    def clear(self) -> None:
        """There is nothing to show."""
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)


__all__ = ["Climbing"]
