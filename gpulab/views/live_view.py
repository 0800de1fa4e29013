"""Shows a run while it goes on and when it has ended: as a live view in a notebook, or in the terminal.

The live view is one anywidget that draws a run in the browser while its cell still goes on. A thread drains the feed
and calls nothing but `Widget.send`: traits are not thread safe, and ipykernel 7 loses or misplaces what a thread prints
or displays. Nothing in this module may break the run: a failure ends the view quietly; `LiveView.problem` has the
reason.

Wire format, read by frontend/src/message.js: a JSON head `{v, status, samples, series, ended}` and float32 buffers,
little-endian: the steps as rows of `STEP_COLUMNS`, then one buffer of (s, value) rows per name in `samples`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.facts import facts
from gpulab.diagnosis.catalogue import kind_of
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.headline import summary
from gpulab.formatting import decapitalized, plain_values, plural, while_s
from gpulab.run import Missing
from gpulab.views.page import static
from gpulab.views.widgets import (
    Output,
    Repeater,
    accept_stop,
    close,
    in_notebook,
    running_kernel,
    show_bundle,
    widget_class,
)

if TYPE_CHECKING:
    from gpulab.live_feed import Delta, Feed, SeriesInfo, SoFar
    from gpulab.views.report.ranks import RankedReport
    from gpulab.views.report.report import Report

WIRE_VERSION = 2
STEP_COLUMNS = ("end_s", "wall_ms", "wait_ms", "samples_per_s")
INTERVAL_S = 0.1  # 10 Hz: smooth to the eye, about 0.3 % of one core
PLAIN_TEXT = "gpulab is measuring this cell; its report follows when the cell ends."
NOTE_S = 5.0  # between two frames for a notebook without a kernel


def last_frame(text: str) -> dict[str, str]:
    """What a notebook shows in place of the view if the kernel went away in the middle of the run."""
    words = f"{text} The kernel ended or was restarted during this run. What was measured so far: %gpulab report"
    html = f'<style>{static("live_note.css")}</style><div class="gpulab-live-note">{escape(words)}</div>'
    return {"text/plain": "", "text/html": html}


def _error_words(e: Exception) -> str:
    return f"{type(e).__name__}: {e}"


def message(
    delta: Delta, series: tuple[SeriesInfo, ...], *, ended: bool = False
) -> tuple[dict[str, object], list[bytes]]:
    """Head and buffers: the new data, and the legend of all curves."""
    head = {
        "v": WIRE_VERSION,
        "status": plain_values(delta.status),
        "samples": list(delta.samples),
        "series": plain_values(series),
        "ended": ended,
    }
    return head, [np.asarray(rows, "<f4").tobytes() for rows in (delta.steps, *delta.samples.values())]


class LiveView:
    """A `Monitor` that shows one run in the notebook's output area. Make a new one for each run.

    `problem` says why the view ended early; empty while it works.
    """

    def __init__(self, kernel: object, interval_s: float = INTERVAL_S) -> None:
        self.problem = ""
        self._kernel = kernel
        self._interval_s = interval_s
        self._run_key = uuid.uuid4().hex
        self._feed: Feed | None = None
        self._widget: Any = None
        self._note = Output()
        self._note_due_s = 0.0
        self._output = Output()
        self._repeater: Repeater | None = None
        self._refuse_stop: Callable[[], None] = lambda: None
        self._sentence = Sentence()

    def begin(self, feed: Feed) -> None:
        """Display the view and start feeding it. Never raises."""
        self._feed = feed
        try:
            self._widget = _widget_class()(run_key=self._run_key)
            self._refuse_stop = accept_stop(self._kernel, self._run_key, feed.request_stop)
            self._widget.on_msg(self._on_comm)
            self._note.show(last_frame("gpulab was measuring this cell."))
            self._output.show_widget(self._widget, PLAIN_TEXT)
        except Exception as e:  # a broken front end must not cost the user the run
            self.problem = _error_words(e)
            self.close()
            return
        self._repeater = Repeater("live-view", self._push, self._interval_s)

    def _on_comm(self, _widget: object, content: dict[str, object], _buffers: object) -> None:
        """Handle Stop from a front end without a control channel; the message arrives while the main thread is free."""
        if content.get("kind") == "stop" and self._feed is not None:  # None once the run is over
            self._feed.request_stop()

    def _push(self, *, ended: bool = False) -> bool:
        """Send the new data, and now and then the frame for a notebook without this kernel; False ends the thread."""
        if self._feed is None or self._widget is None or self.problem:
            return False
        try:
            delta = self._feed.drain()
            status = delta.status
            if not ended and (so_far := self._sentence.words(self._feed, status.elapsed_s)):
                delta = replace(delta, status=replace(status, message=so_far))
            head, buffers = message(delta, self._feed.series(), ended=ended)
            self._widget.send(head, buffers=buffers)
        except Exception as e:
            self.problem = _error_words(e)
            return False
        if status.elapsed_s >= self._note_due_s + NOTE_S:
            self._note_due_s = status.elapsed_s
            steps = plural(status.step, "step") if status.step else "before the first step"
            self._note.show(last_frame(f"gpulab, after {while_s(status.elapsed_s)}: {steps}."))
        return True

    def end(self) -> None:
        """Stop the thread and the Stop button, and show the last steps."""
        self._refuse_stop()
        if self._repeater is not None and not self._repeater.stop():
            self.problem = self.problem or "the feed did not answer"
        self._push(ended=True)
        self._feed = None

    def close(self) -> None:
        """Remove the view with its thread, handler and widget. May be called twice."""
        self.end()
        self._output.clear()
        self._note.clear()
        widget, self._widget = self._widget, None
        if widget is None:
            return
        try:
            widget.on_msg(self._on_comm, remove=True)
            close(widget)
        except Exception as e:
            self.problem = _error_words(e)


@cache
def _widget_class() -> Callable[..., Any]:
    """The widget class whose messages frontend/src/index.js draws."""
    return widget_class("live.js", run_key="")


def why_no_live_view() -> str:
    """Why this process can show no live view, as one clause; empty if it can."""
    if not in_notebook():
        return "no Jupyter kernel runs this code"
    if importlib.util.find_spec("anywidget") is None:
        return "the package anywidget is not installed"
    return ""


EVERY_S = 3.0


class Sentence:
    """A sentence about the run so far, renewed every few seconds: it takes 2 ms. A failure cannot break the run."""

    def __init__(self) -> None:
        self._words = ""
        self._due_s = 0.0

    def words(self, feed: Feed, elapsed_s: float) -> str:
        """ "So far (40 steps), …"; empty while nothing can be said."""
        if elapsed_s >= self._due_s:
            self._due_s = elapsed_s + EVERY_S
            with suppress(Exception):
                until_now = feed.so_far()
                self._words = self._words if until_now is None else _sentence(until_now)
        return self._words


def _sentence(until_now: SoFar) -> str:
    diagnosis = diagnose(facts(until_now.run), until_now.thresholds)
    first = diagnosis.first
    speaks = not kind_of(first.key).is_verdict or first.level == "good"
    steps = plural(len(until_now.run.steps), "step")
    return f"So far ({steps}), {decapitalized(summary(first, diagnosis))}" if speaks else ""


class Stage(Struct):
    """One run's place on the screen. In a notebook: first the live view, then the report in its place.

    `lacks_live` is the reason why no live view could be made, or empty. `full`: nothing is folded.
    """

    monitor: LiveView | None
    notebook: bool = False
    lacks_live: str = ""
    full: bool = False

    @classmethod
    def open(cls, *, live: bool, full: bool = False) -> Stage:
        """Prepare, before the run starts, everything that its end would otherwise wait for."""
        live = live and in_notebook()
        lacks_live = why_no_live_view() if live else ""
        monitor = LiveView(running_kernel()) if live and not lacks_live else None
        return cls(monitor, in_notebook(), lacks_live, full)

    def show(self, report: Report | RankedReport) -> None:
        """Put the report where the live view was; in a terminal, print it."""
        if self.notebook:
            reason = self.lacks_live or (self.monitor.problem if self.monitor is not None else "")
            self._replace_view((_without_live_view(report, reason) if reason else report).bundle(full=self.full))
        else:
            sys.stdout.write(report.text(full=self.full) + "\n")

    def say(self, sentence: str) -> None:
        """Put a sentence where the live view was; in a terminal, print it."""
        if self.notebook:
            self._replace_view({"text/plain": sentence})
        else:
            sys.stdout.write(sentence + "\n")

    def _replace_view(self, bundle: dict[str, object]) -> None:
        if self.monitor is not None:
            self.monitor.close()
        show_bundle(bundle)


def _without_live_view(report: Report | RankedReport, reason: str) -> Report | RankedReport:
    """The report with the live view listed as missing. The record is unchanged: only this display lacks it."""
    from gpulab.views.report.report import Report

    if not isinstance(report, Report):
        return report
    lacking = Missing("live view (the run itself is whole)", reason, key="live_view")
    run = replace(report.facts.run, missing=(*report.facts.run.missing, lacking))
    return dataclasses.replace(report, facts=replace(report.facts, run=run))
