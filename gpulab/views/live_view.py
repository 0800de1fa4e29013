"""Where a run is shown while it goes on and when it has ended: a live view in a notebook, or the terminal.

The live view is one anywidget that draws a run in the browser while its cell still goes on. A thread drains the feed,
and only ever calls `Widget.send`: traits are not thread safe, and ipykernel 7 loses or misplaces what a thread prints
or displays. Nothing here may break the run: a failure ends the view, quietly, and is kept in `LiveView.problem`.

Wire format, read by frontend/src/message.js: a JSON head `{v, status, samples, series?, phases?, ended?}` and float32
buffers, little-endian: the steps as rows of `STEP_COLUMNS`, then one buffer of (s, value) rows per name in `samples`.
"""

from __future__ import annotations

import contextvars
import dataclasses
import importlib.util
import sys
import threading
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.facts import facts
from gpulab.diagnosis.catalogue import kind_of
from gpulab.diagnosis.diagnose import diagnose, summary
from gpulab.formatting import decapitalized, plain_values, plural, while_s
from gpulab.run import Missing
from gpulab.views.html import static
from gpulab.views.widgets import accept_stop, close, widget_class

if TYPE_CHECKING:
    import numpy.typing as npt

    from gpulab.live_feed import Delta, Feed, SeriesInfo, SoFar, Status
    from gpulab.run import Float32
    from gpulab.views.report.ranks import RankedReport
    from gpulab.views.report.report import Report

WIRE_VERSION = 1
STEP_COLUMNS = ("end_s", "wall_ms", "wait_ms", "samples_per_s", "count", "wall_max_ms")
INTERVAL_S = 0.1  # 10 Hz: smooth to the eye, about 0.3 % of one core
ROWS_PER_MESSAGE = 512  # per buffer; faster steps are merged, which a chart of 1,000 pixels does not show
HISTORY_ROWS = 1024
JOIN_TIMEOUT_S = 5.0
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
PLAIN_TEXT = "gpulab is measuring this cell; its report follows when the cell ends."


EMPTY = {"text/plain": "", "text/html": ""}
NOTE_S = 5.0  # between two last frames


def last_frame(text: str) -> dict[str, str]:
    """What a notebook shows in place of the view where the kernel went away in the middle of the run."""
    words = f"{text} The kernel ended or was restarted during this run. What was measured so far: %gpulab report"
    html = f'<style>{static("live_note.css")}</style><div class="gpulab-live-note">{escape(words)}</div>'
    return {"text/plain": "", "text/html": html}


class Head(TypedDict, total=False):
    """The JSON part of a message."""

    v: int
    status: dict[str, object]
    samples: list[str]
    series: list[dict[str, object]]
    phases: list[dict[str, object]]
    ended: bool


class LiveView:
    """A `Watcher` that shows one run in the notebook's output area. Make a new one for each run.

    `handle` is the output it shows itself in; `problem` says why it ended early, None while all is well.
    """

    def __init__(self, kernel: object, interval_s: float = INTERVAL_S) -> None:
        self.handle: Any = None
        self._note: Any = None
        self._note_due_s = 0.0
        self._context = contextvars.copy_context()
        self.problem: str | None = None
        self._kernel = kernel
        self._interval_s = interval_s
        self._run_key = uuid.uuid4().hex
        self._over = threading.Event()
        self._feed: Feed | None = None
        self._widget: Any = None
        self._thread: threading.Thread | None = None
        self._refuse_stop: Callable[[], None] = lambda: None
        self._messages = Messages()
        self._sentence = Sentence()

    def begin(self, feed: Feed) -> None:
        """Display the view and start feeding it. Never raises."""
        self._feed = feed
        try:
            from IPython.display import display

            self._widget = widget = _widget_class()(run_key=self._run_key)
            self._refuse_stop = accept_stop(self._kernel, self._run_key, feed.request_stop)
            widget.on_msg(self._on_comm)
            data, metadata = widget._repr_mimebundle_() or ({}, {})
            shown = {**data, "text/plain": PLAIN_TEXT}
            self._note = display(last_frame("gpulab was measuring this cell."), raw=True, display_id=True)  # type: ignore[no-untyped-call]
            self.handle = display(shown, metadata=metadata, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        except Exception as e:  # a broken front end must not cost the user the run
            self._fail(e)
            self.close()
            return
        self._context = contextvars.copy_context()  # says to which cell an output belongs
        run = self._context.run
        self._thread = threading.Thread(target=run, args=(self._pump, feed), name="gpulab-live-view", daemon=True)
        self._thread.start()

    def _on_comm(self, _widget: object, content: dict[str, object], _buffers: object) -> None:
        """Stop, from a front end that offers no control channel; heard while the main thread is free."""
        if content.get("kind") == "stop" and self._feed is not None:  # None once the run is over
            self._feed.request_stop()

    def _pump(self, feed: Feed) -> None:
        while not self._over.wait(self._interval_s):
            if not self._push(feed):
                return

    def _push(self, feed: Feed, *, ended: bool = False) -> bool:
        """Send what is new. False where that failed, and the view has ended."""
        if self._widget is None or self.problem:
            return False
        try:
            delta = feed.drain()
            if not ended:
                so_far = self._sentence.words(feed, delta.status.elapsed_s)
                delta = replace(delta, status=replace(delta.status, message=so_far or delta.status.message))
            head, buffers = self._messages.encode(delta, feed.series(), ended=ended)
            self._widget.send(head, buffers=buffers)
            self._keep_frame(delta.status)
        except Exception as e:
            self._fail(e)
            return False
        return True

    def _keep_frame(self, status: Status) -> None:
        """Now and then, for a notebook that is opened without this kernel."""
        if status.elapsed_s >= self._note_due_s + NOTE_S:
            self._note_due_s = status.elapsed_s
            steps = f"{status.step:,} step{'s' * (status.step != 1)}" if status.step else "before the first step"
            self._note.update(last_frame(f"gpulab, after {while_s(status.elapsed_s)}: {steps}."), raw=True)

    def _fail(self, e: Exception) -> None:
        self.problem = f"{type(e).__name__}: {e}"

    def end(self) -> None:
        """Stop the thread and the Stop button, show the last steps, and keep the chart for a reload of the page."""
        self._over.set()
        self._refuse_stop()
        if self._thread is not None:
            self._thread.join(JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                self.problem = self.problem or f"the feed did not answer within {JOIN_TIMEOUT_S:g} s"
            self._thread = None
        if self._feed is not None and self._widget is not None and self._push(self._feed, ended=True):
            try:
                self._widget.history = self._messages.history()
            except Exception as e:
                self._fail(e)
        self._feed = None

    def replace(self, bundle: dict[str, object]) -> bool:
        """Show the MIME bundle below all that the cell has printed, and take the view away.

        False where there is no view, or that failed.
        """
        if self.handle is None:
            self.close()
            return False
        try:
            from IPython.display import display

            self.handle.update(EMPTY, raw=True)
            self._note.update(EMPTY, raw=True)
            display(bundle, raw=True)  # type: ignore[no-untyped-call]
        except Exception as e:
            self._fail(e)
            return False
        finally:
            self.close()
        return True

    def close(self) -> None:
        """Leave no thread, handler or widget behind. May be called twice."""
        self._over.set()
        self._refuse_stop()
        widget, self._widget = self._widget, None
        if widget is None:
            return
        try:
            widget.on_msg(self._on_comm, remove=True)
            close(widget)
        except Exception as e:
            self._fail(e)


class Messages:
    """Turns deltas into messages, and remembers the run in bounded memory."""

    def __init__(self) -> None:
        self._series: tuple[SeriesInfo, ...] = ()
        self._steps = Rows(merge_steps)
        self._samples: dict[str, Rows] = {}
        self._phases: list[dict[str, object]] = []
        self._status: Status | None = None

    def encode(self, delta: Delta, series: tuple[SeriesInfo, ...], *, ended: bool = False) -> tuple[Head, list[bytes]]:
        """One message with what is new; the legend only where it changed."""
        steps = widened(delta.steps)
        self._remember(delta.status, steps, delta.samples)
        head = _head(delta.status, list(delta.samples))
        if series != self._series:
            self._series = series
            head["series"] = [plain_values(s) for s in series]
        if ended:
            head["ended"] = True
        return head, _buffers(thinned(steps, ROWS_PER_MESSAGE, merge_steps), delta.samples.values(), ROWS_PER_MESSAGE)

    def _remember(self, status: Status, steps: Float32, samples: dict[str, Float32]) -> None:
        self._status = status
        if not self._phases or self._phases[-1]["phase"] != status.phase:
            self._phases.append({"phase": status.phase, "from": status.elapsed_s})
        self._steps.add(steps)
        for name, rows in samples.items():
            self._samples.setdefault(name, Rows(merge_samples)).add(rows)

    def history(self) -> dict[str, object]:
        """The whole run as one message: what the page shows after a reload."""
        if self._status is None:
            return {}
        head = _head(self._status, list(self._samples))
        head["series"] = [plain_values(s) for s in self._series]
        head["phases"] = self._phases
        head["ended"] = True
        steps = thinned(self._steps.all(), HISTORY_ROWS, merge_steps)
        return {
            "head": head,
            "buffers": _buffers(steps, (rows.all() for rows in self._samples.values()), HISTORY_ROWS),
        }


Merge = Callable[["Float32", "npt.NDArray[np.intp]"], "Float32"]


class Rows:
    """Rows of one table, merged to fewer where they become many, so that a run of any length stays small."""

    def __init__(self, merge: Merge) -> None:
        self._merge = merge
        self._chunks: list[Float32] = []
        self._count = 0

    def add(self, rows: Float32) -> None:
        if not len(rows):
            return
        self._chunks.append(rows)
        self._count += len(rows)
        if self._count > 4 * HISTORY_ROWS:
            self._chunks = [thinned(self.all(), 2 * HISTORY_ROWS, self._merge)]
            self._count = len(self._chunks[0])

    def all(self) -> Float32:
        return np.concatenate(self._chunks) if self._chunks else np.empty((0, 0), np.float32)


def widened(steps: Float32) -> Float32:
    """The feed's step rows as rows of `STEP_COLUMNS`: each stands for one step, which is its own slowest."""
    return np.column_stack((steps, np.ones(len(steps), np.float32), steps[:, 1])).astype(np.float32, copy=False)


def thinned(rows: Float32, keep: int, merge: Merge) -> Float32:
    """At most `keep` rows, each merged from equally many neighbours."""
    if len(rows) <= keep:
        return rows
    return merge(rows, np.arange(0, len(rows), -(-len(rows) // keep)))


def merge_steps(rows: Float32, starts: npt.NDArray[np.intp]) -> Float32:
    """Rows of `STEP_COLUMNS`: the last end, means over steps, the rate over their time, the slowest of all."""
    _end, wall, wait, rate, count, slowest = rows.astype(np.float64).T
    steps = np.add.reduceat(count, starts)
    time = np.add.reduceat(wall * count, starts)
    samples = np.add.reduceat(np.where(wall > 0, rate * wall * count, 0.0), starts)
    with np.errstate(divide="ignore", invalid="ignore"):
        columns = (
            rows[_last(starts, len(rows)), 0],
            time / steps,
            np.add.reduceat(wait * count, starts) / steps,
            samples / time,
            steps,
            np.maximum.reduceat(slowest, starts),
        )
    return np.column_stack(columns).astype(np.float32)


def merge_samples(rows: Float32, starts: npt.NDArray[np.intp]) -> Float32:
    """(s, value) rows: the last time, the mean value."""
    last = _last(starts, len(rows))
    mean = np.add.reduceat(rows[:, 1].astype(np.float64), starts) / (last - starts + 1)
    return np.column_stack((rows[last, 0], mean)).astype(np.float32)


def _last(starts: npt.NDArray[np.intp], length: int) -> npt.NDArray[np.intp]:
    return np.append(starts[1:], length) - 1


def _head(status: Status, samples: list[str]) -> Head:
    return {"v": WIRE_VERSION, "status": plain_values(status), "samples": samples}


def _buffers(steps: Float32, samples: Iterable[Float32], keep: int) -> list[bytes]:
    tables = [steps, *(thinned(rows, keep, merge_samples) for rows in samples)]
    return [np.ascontiguousarray(table, dtype="<f4").tobytes() for table in tables]


@cache
def _widget_class() -> Callable[..., Any]:
    """A pipe to frontend/src/index.js. `history` is set once, at the end; everything else is sent."""
    return widget_class("live.js", run_key="", history={})


def why_no_live_view() -> str | None:
    """Why this process can show no live view, as one clause; None where it can."""
    if running_kernel() is None:
        return "no Jupyter kernel runs this code"
    if importlib.util.find_spec("anywidget") is None:
        return "the package anywidget is not installed"
    return None


def live_view_or_none() -> LiveView | None:
    """A live view for the run that is about to start; None where nothing could show it (`why_no_live_view`)."""
    return None if why_no_live_view() else LiveView(running_kernel())


def running_kernel() -> Any:
    """The kernel that runs this code; None where none does."""
    ipython = sys.modules.get("IPython")  # not imported: then no kernel runs us
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None)


EVERY_S = 3.0


class Sentence:
    """Renewed every few seconds: to find it takes two milliseconds. Nothing here may break the run."""

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
    """One run's place on the screen. In a notebook: the live view first, then in its place the report.

    `lacks_live` is the reason why a live view that was wanted could not be made, or empty. `full`: nothing is folded.
    """

    watcher: LiveView | None
    notebook: bool = False
    lacks_live: str = ""
    full: bool = False

    @classmethod
    def open(cls, *, live: bool, full: bool = False) -> Stage:
        """Prepare before the run starts what its end would have to wait for."""
        if not in_notebook():
            return cls(None, full=full)
        if not live:
            return cls(None, notebook=True, full=full)
        return cls(live_view_or_none(), notebook=True, lacks_live=why_no_live_view() or "", full=full)

    def show(self, report: Report | RankedReport) -> None:
        """Put the report where the live view was; in a terminal, print it."""
        if not self.notebook:
            sys.stdout.write(report.text(full=self.full) + "\n")
            return
        from gpulab.views.report.ranks import RankedReport

        whole = report if isinstance(report, RankedReport) else self._with_missing_live_view(report)
        self._display(whole.bundle(full=self.full))

    def say(self, sentence: str) -> None:
        """Put a sentence where the live view was; in a terminal, print it."""
        if not self.notebook:
            sys.stdout.write(sentence + "\n")
            return
        self._display({"text/plain": sentence})

    def _display(self, bundle: dict[str, object]) -> None:
        from IPython.display import display

        if self.watcher is None or not self.watcher.replace(bundle):
            display(bundle, raw=True)  # type: ignore[no-untyped-call]

    def _with_missing_live_view(self, report: Report) -> Report:
        """The report with a missing live view among what is missing: of this showing, so not in the record."""
        reason = self.lacks_live or (self.watcher.problem if self.watcher is not None else None)
        if not reason:
            return report
        facts = report.facts
        lacking = Missing("live view (the run itself is whole)", reason, key="live_view")
        run = replace(facts.run, missing=(*facts.run.missing, lacking))
        return dataclasses.replace(report, facts=replace(facts, run=run))


def in_notebook() -> bool:
    """Whether an IPython kernel runs this code: a front end that can show pictures."""
    return running_kernel() is not None
