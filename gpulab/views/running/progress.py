"""What an experiment is doing right now: one line that is renewed, in a notebook with a bar."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gpulab.formatting import while_s
from gpulab.tuning.plan import Listener, Progress
from gpulab.views.running.display import in_notebook

if TYPE_CHECKING:
    from gpulab.views.comparison.comparison import Compared

RENEWED_S = 0.2


class Progressing:
    """Shows progress while its block runs, then the result in its place. `also` is told of each step, too."""

    def __init__(self, also: Listener | None, *, show: bool = True) -> None:
        self._also = also
        self._show = show
        self._notebook = show and in_notebook()
        self._handle: Any = None
        self._shown_at = 0.0
        self._written = 0

    def __enter__(self) -> Self:
        if self._notebook:
            from IPython.display import display

            self._handle = display({"text/plain": "gpulab: …"}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        return self

    def tell(self, progress: Progress) -> None:
        """Say where the experiment stands."""
        if self._also is not None:
            self._also(progress)
        if not self._show or time.monotonic() - self._shown_at < RENEWED_S:
            return
        self._shown_at = time.monotonic()
        with suppress(Exception):  # a view that fails must not end the experiment
            self._draw(progress)

    def _draw(self, progress: Progress) -> None:
        if self._handle is not None:
            self._handle.update({"text/html": _html(progress), "text/plain": words(progress)}, raw=True)
        elif sys.stderr.isatty():
            line = f"gpulab: {words(progress)}"
            sys.stderr.write("\r" + line.ljust(self._written))
            sys.stderr.flush()
            self._written = len(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._written:
            sys.stderr.write("\r" + " " * self._written + "\r")
        if self._handle is not None and error is not None:
            self._handle.update({"text/plain": ""}, raw=True)

    def show(self, compared: Compared) -> None:
        """Put the comparison where the progress was."""
        if not self._notebook:
            sys.stdout.write(compared.text() + "\n")
            return
        from IPython.display import display

        if self._handle is not None:
            self._handle.update(compared.bundle(), raw=True)
        display({"text/html": compared.fragment(), "text/plain": ""}, raw=True)  # type: ignore[no-untyped-call]


def words(progress: Progress) -> str:
    """One line: what runs, how far it is, how long it still takes."""
    left = "" if progress.seconds_left is None else f", about {while_s(max(1.0, progress.seconds_left))} left"
    return f"{progress.what} ({progress.done} of {progress.total} done{left})"


def _html(progress: Progress) -> str:
    from html import escape

    share = progress.done / progress.total if progress.total else 0.0
    bar = (
        '<div style="width:320px;height:6px;border-radius:3px;background:rgba(128,128,128,0.25);margin-top:4px">'
        f'<div style="width:{share:.1%};height:6px;border-radius:3px;background:#0072b2"></div></div>'
    )
    return f'<div style="font-size:13px;margin:4px 0">{escape(words(progress))}{bar}</div>'


__all__ = ["Progressing", "words"]
