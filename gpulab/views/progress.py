"""Progress of an experiment: one line that is renewed, with the figures so far below; a notebook adds a bar and Stop.

An experiment runs the user's cell on the main thread, where a click would wait until the experiment ends. So Stop uses
the kernel's control channel (gpulab.views.widgets). The notebook's own stop button works as well. Front ends without
widgets show the same line as HTML.
"""

from __future__ import annotations

import contextvars
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Protocol, Self, TextIO

from markupsafe import Markup
from msgspec import Struct
from msgspec.structs import replace

from gpulab.formatting import plain_values, while_s
from gpulab.options import STOPPED_BY
from gpulab.tuning.schedule import Listener, Progress
from gpulab.views.page import macros
from gpulab.views.waiting import TerminalLine
from gpulab.views.widgets import Output, ProgressWidget, accept_stop, in_notebook, running_kernel, show_bundle

RENEWED_S = 0.2
BEHIND_WIDGET_S = 1.9  # renews the HTML behind a widget if nothing new begins
JITTER_S = 0.5  # error of a begin computed from the elapsed time
TRACED_SHARE = 0.15  # share of the bar for the traced runs, before the blocks


class Displayable(Protocol):
    """A result with its views."""

    def text(self, width: int | None = None, *, full: bool = False) -> str: ...
    def bundle(self, *, full: bool = False) -> dict[str, object]: ...


Level = Literal["quiet", "good", "bad"]


class Status(Struct, frozen=True):
    """The progress for frontend/src/running.js, whose own clock counts on; at the end, the outcome.

    `rest` is the text after the time; `whole_s` is the total duration, `since_s` the begin by this process's clock.
    """

    running: bool = False
    words: str = ""
    rest: str = ""
    fraction: float = 0.0
    whole_s: float | None = None
    since_s: float | None = None
    stopping: bool = False
    message: str = ""
    level: Level = "quiet"

    @classmethod
    def of(cls, progress: Progress, before: Status, *, stopping: bool = False) -> Status:
        """The status while the experiment runs; equal to `before` as long as only time has passed."""
        if progress.elapsed_s is None:
            share = max(before.fraction, share_done(progress))
            return cls(True, words(progress), fraction=share, stopping=stopping)
        since_s = time.time() - progress.elapsed_s
        if before.since_s is not None and abs(since_s - before.since_s) < JITTER_S:
            since_s = before.since_s
        whole_s, share = progress.about_s or progress.most_s, before.fraction
        if whole_s is None or whole_s != before.whole_s:
            share = max(before.share_at(progress.elapsed_s), share_done(progress))
        return cls(True, progress.what, rest_of(progress), share, whole_s, since_s, stopping)

    def share_at(self, elapsed_s: float | None) -> float:
        """How much of the bar is full; it never shrinks."""
        return max(self.fraction, min(1.0, elapsed_s / self.whole_s) if elapsed_s and self.whole_s else 0.0)

    def sent(self) -> dict[str, object]:
        return {**plain_values(self), "sent_s": time.time()}


class Progressing:
    """Shows progress while the `with` block runs, then the result in its place. `also` is called with each step, too.

    `show`: whether to show the result; the progress is shown either way.
    """

    def __init__(self, also: Listener | None, *, show: bool = True) -> None:
        self._also = also
        self._show = show
        self._notebook = in_notebook()
        self._output = Output()
        self._widget: ProgressWidget | None = None
        self._drawn_s = 0.0
        self._status = Status()
        self._line = TerminalLine()
        self._context = contextvars.copy_context()

    def __enter__(self) -> Self:
        self._context = contextvars.copy_context()  # says to which cell an output belongs
        if self._notebook:
            self._output.show({"text/plain": "gpulab: …"})
        return self

    def tell(self, progress: Progress) -> None:
        """Show the experiment's progress."""
        if self._also is not None:
            self._also(progress)
        self._renew(progress, RENEWED_S)

    def tick(self, progress: Progress) -> None:
        """Show the progress from another thread, while the user's code runs on this thread."""
        self._context.copy().run(self._renew, progress, BEHIND_WIDGET_S if self._widget is not None else RENEWED_S)

    def _renew(self, progress: Progress, every_s: float) -> None:
        self._status = Status.of(progress, self._status, stopping=self._status.stopping)
        with suppress(Exception):  # a view that fails must not end the experiment
            if self._widget is not None:
                self._widget.show(status=self._status)
            if time.monotonic() - self._drawn_s < every_s:
                return
            self._drawn_s = time.monotonic()
            if self._output:
                self._draw(progress)
            else:
                self._line.write(f"gpulab: {words(progress, self._figures())}")

    def _draw(self, progress: Progress) -> None:
        line = macros("running.html").progress(words(progress), self._status.share_at(progress.elapsed_s))
        if self._widget is not None:  # a live widget hides the HTML
            line = Markup('<div class="gpulab-twin-{}">{}</div>').format(self._widget.key, line)
        text = words(progress, self._figures())
        self._output.show({"text/html": f"{line}{self._picture()}", "text/plain": text})

    def _figures(self) -> str:
        """The figures so far, in a few words."""
        return ""

    def _picture(self) -> Markup:
        """The figures so far as HTML."""
        return Markup()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._line.clear()
        if error is not None or not self._show:
            self.clear()

    def clear(self) -> None:
        """Remove the progress without showing a result."""
        self._output.clear()

    def put(self, result: Displayable, *, full: bool = False) -> None:
        """Show the result below all printed output, and remove the progress."""
        if not self._show:
            return
        if self._output:
            self.clear()
            show_bundle(result.bundle(full=full))
        else:
            sys.stdout.write(result.text(full=full) + "\n")


class Stoppable(Progressing):
    """`Progressing` with a Stop button: the button calls `stop`, `hint` is its label."""

    def __init__(self, stop: Callable[[], None], hint: str, *, also: Listener | None = None, show: bool = True) -> None:
        super().__init__(also, show=show)
        self._stop = stop
        self._hint = hint
        self._widget_output = Output()
        self._refuse_stop: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        if self._notebook:
            with suppress(Exception):  # the notebook's own stop button works without ipywidgets, too
                self._show_widget()
        return super().__enter__()

    def _show_widget(self) -> None:
        widget = ProgressWidget(uuid.uuid4().hex, self._hint, self._request_stop)
        self._refuse_stop = accept_stop(running_kernel(), widget.key, self._request_stop)
        self._widget_output.show_widget(widget.root, STOPPED_BY)
        self._widget = widget

    def _request_stop(self) -> None:
        self._status = replace(self._status, stopping=True)
        self._stop()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._refuse_stop()
        with suppress(Exception):
            self._widget_output.clear()  # a widget in a saved notebook is an error message
            if self._widget is not None:
                self._widget.close()
        super().__exit__(kind, error, trace)


LOG_S = 10.0


def log_lines(stream: TextIO) -> Listener | None:
    """A listener that logs an experiment, a line every few seconds, the first at once; at a terminal None."""
    if stream is None or stream.isatty():
        return None
    due_s = 0.0

    def tell(progress: Progress) -> None:
        nonlocal due_s
        if progress.elapsed_s is not None and progress.elapsed_s >= due_s:
            due_s = progress.elapsed_s + LOG_S
            stream.write(f"gpulab: {words(progress)}\n")
            stream.flush()

    return tell


def words(progress: Progress, figures: str = "") -> str:
    """One line: what runs, how far it is, and the total time.

    With figures, the time and the figures come first, because a narrow terminal cuts off the end of the line.
    """
    if progress.elapsed_s is None:
        left = "" if progress.rest_s is None else f", about {while_s(max(1.0, progress.rest_s))} left"
        return f"{progress.what} ({progress.done:g} of {progress.total} done{left})"
    time_of_all = f"{while_s(progress.elapsed_s)}{rest_of(progress)}"
    return " · ".join([time_of_all, figures, progress.what] if figures else [progress.what, time_of_all])


def rest_of(progress: Progress) -> str:
    """The text after the time: " of about 40 s, at most 60 s", and a sentence about the limit."""
    bounds = [f"about {while_s(progress.about_s)}"] if progress.about_s is not None else []
    if progress.most_s is not None and not (bounds and while_s(progress.most_s) == while_s(progress.about_s or 0.0)):
        bounds.append(f"at most {while_s(progress.most_s)}")
    of_all = f" of {', '.join(bounds)}" if bounds else ""
    return f"{of_all}. {progress.note}" if progress.note else of_all


def share_done(progress: Progress) -> float:
    """By elapsed time if the total time is known; else by the traced runs, then the blocks."""
    whole_s = progress.about_s or progress.most_s
    if progress.elapsed_s is not None and whole_s:
        return min(1.0, progress.elapsed_s / whole_s)
    share = min(1.0, progress.done / progress.total) if progress.total else 0.0
    return TRACED_SHARE + (1 - TRACED_SHARE) * share if progress.in_blocks else TRACED_SHARE * share
