"""Where a run is shown while it goes on and when it has ended: a notebook's output, or the terminal."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gpulab.run import Missing
from gpulab.views.running.live_plot import LiveView, live_view_or_none, running_kernel, why_no_live_view

if TYPE_CHECKING:
    from gpulab.views.report.ranks import RankedReport
    from gpulab.views.report.report import Report


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
