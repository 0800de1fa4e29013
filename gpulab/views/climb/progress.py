"""A climb while it goes on: the ladder so far, what runs right now, and a Stop button."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

from gpulab.diagnosis.headline import Headline
from gpulab.tuning.climb.record import Climb
from gpulab.tuning.plan import Progress
from gpulab.views import html
from gpulab.views.climb.attempts import result
from gpulab.views.climb.html_figure import picture_of
from gpulab.views.running.progress import STOPPED_BY, Stoppable, words

HINT = "End the climb at the next step; what was kept so far is shown"


class Climbing(Stoppable):
    """Shows the ladder while its block runs, then the result in its place."""

    def __init__(self, stop: Callable[[], None], *, show: bool = True) -> None:
        super().__init__(stop, HINT, show=show)
        self._climb: Climb | None = None
        self._reported_rungs = 0

    def show_ladder(self, climb: Climb) -> None:
        """Show the ladder so far; in a terminal a line for each new try."""
        if not self._show or climb.written is None:
            return
        with suppress(Exception):  # a view that fails must not end the climb
            self._climb = climb
            if self._handle is not None:
                self._draw_ladder("…")
                return
            self._line.clear()
            for rung in climb.rungs[self._reported_rungs :]:
                sys.stdout.write(f"gpulab: {rung.label}: {result(rung)}\n")
            self._reported_rungs = len(climb.rungs)

    def _draw(self, progress: Progress) -> None:
        self._draw_ladder(words(progress))

    def _draw_ladder(self, line: str) -> None:
        climb = self._climb
        what = f"Climbing, try {len(climb.rungs) + 1}: {line}" if climb else f"Measuring the cell as written: {line}"
        drawn = picture_of(climb) if climb else ""
        fragment = html.fragment(Headline("climbing", what, STOPPED_BY, "unknown"), (), drawn)
        self._handle.update({"text/html": fragment, "text/plain": what}, raw=True)
