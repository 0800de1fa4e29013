"""One climb, each way to show it, and how it is shown while it goes on; its JSON is docs/climb-json.md."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from markupsafe import Markup

from gpulab.diagnosis.diagnose import Headline
from gpulab.diagnosis.finding import Finding
from gpulab.formatting import picked
from gpulab.options import STOPPED_BY
from gpulab.prediction.prediction import Prediction
from gpulab.tuning.bench import Bench, Row, memory_peak_bytes, with_run
from gpulab.tuning.climb_record import Attempt, Climb
from gpulab.tuning.plan import Progress
from gpulab.tuning.record import Side
from gpulab.views import bench, climb_sections, html
from gpulab.views.climb_sections import busy_fraction, data_wait_fraction, headline, kept_edit, origin, result
from gpulab.views.comparison import comparison_document
from gpulab.views.layout import Section
from gpulab.views.progress import Stoppable, words
from gpulab.views.view import View


@dataclass(frozen=True, slots=True, repr=False)
class Climbed(View):
    """A climb with its views."""

    result: Climb

    @property
    def kept(self) -> dict[str, str]:
        """The settings that were kept."""
        return self.result.kept

    @property
    def rungs(self) -> tuple[Attempt, ...]:
        """Every try, in order."""
        return self.result.rungs

    @property
    def ratio(self) -> float | None:
        """Time of all kept settings over the baseline: below 1 is faster; None where they were not compared."""
        return self.result.whole.ratio if self.result.whole is not None else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the ratio."""
        return self.result.whole.interval if self.result.whole is not None else None

    @property
    def edit(self) -> str:
        """What makes all kept settings permanent: a diff of the cell, or a snippet; empty where nothing was kept."""
        keep = climb_sections.kept_edit(self.result)
        return keep.code if keep is not None else ""

    @property
    def headline(self) -> Headline:
        """The sentence, its evidence and its level."""
        return climb_sections.headline(self.result)

    def _figures(self) -> dict[str, object]:
        return climb_document(self.result)

    def __repr__(self) -> str:
        return f"<climb: {self.headline.sentence}>"

    def _opening(self) -> str:
        return climb_sections.opening(self.result)

    def _more(self) -> str:
        return self._more_in_python("climbs[-1]")

    def _picture(self) -> Markup:
        return picture_of(self.result)

    def _sections(self) -> tuple[Section, ...]:
        return climb_sections.sections(self.result)


SCHEMA = 1


def climb_document(climb: Climb) -> dict[str, object]:
    """Every figure."""
    edit = kept_edit(climb)
    return {
        "schema": SCHEMA,
        "kind": "climb",
        "headline": headline(climb),
        **picked(climb, "ended", "seconds", "kept"),
        "edit": edit.code if edit is not None else None,
        "edit_is_diff": edit is not None and climb.top is not None and climb.top.edit_is_diff,
        "written": _side(climb.baseline),
        "rungs": [_rung(rung) for rung in climb.rungs],
        "whole": comparison_document(climb.whole) if climb.whole is not None else None,
        "left": [_finding(f) for f in climb.diagnosis.findings] if climb.diagnosis is not None else [],
        "not_tried": [{"setting": p.label, "why": p.why} for p in climb.skips],
    }


def _rung(rung: Attempt) -> dict[str, object]:
    comparison = rung.comparison
    return {
        "number": rung.number,
        "settings": dict(rung.settings),
        "back": list(rung.back),
        "finding": rung.finding.key if rung.finding is not None else "screening",
        **picked(rung, "kept", "outcome", "words"),
        "prediction": _prediction(rung.prediction),
        **picked(comparison, "verdict", "times_as_fast", "times_as_fast_interval", "ratio", "interval"),
        "us_per_step_before": comparison.a.us_per_step if comparison is not None else None,
        "us_per_sample_before": comparison.a.us_per_sample if comparison is not None else None,
        "loss": rung.loss.verdict if rung.loss is not None else None,
        "seconds": rung.seconds,
        **_side(comparison.b if comparison is not None else None),
    }


def _side(side: Side | None) -> dict[str, object]:
    facts = side.facts if side is not None else None
    return {
        "run": facts.run.id if facts is not None else None,
        **picked(side, "us_per_step", "us_per_sample"),
        "busy_fraction": busy_fraction(facts),
        "data_wait_fraction": data_wait_fraction(facts),
        "memory_bytes": memory_peak_bytes(facts),
    }


def _prediction(prediction: Prediction | None) -> dict[str, object] | None:
    if prediction is None:
        return None
    return {**picked(prediction, "ratio", "interval"), "refused": prediction.refused or None}


def _finding(finding: Finding) -> dict[str, object]:
    return {
        **picked(finding, "key", "summary", "recoverable_us_per_step"),
        "cure": finding.cure or None,
        "source_line": finding.source_line or None,
    }


HINT = "End the climb at the next step; what was kept so far is shown"


class Climbing(Stoppable):
    """Shows the ladder while its block runs, then the result in its place."""

    def __init__(self, stop: Callable[[], None], *, show: bool = True) -> None:
        super().__init__(stop, HINT, show=show)
        self._climb: Climb | None = None
        self._reported_rungs = 0

    def show_ladder(self, climb: Climb) -> None:
        """Show the ladder so far; in a terminal a line for each new try."""
        if not self._show or climb.baseline is None:
            return
        with suppress(Exception):  # a view that fails must not end the climb
            self._climb = climb
            if self._output:
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
        what = f"Climbing, try {len(climb.rungs) + 1}: {line}" if climb else f"Measuring the baseline: {line}"
        drawn = picture_of(climb) if climb else Markup()
        fragment = html.fragment(Headline("climbing", what, STOPPED_BY, "unknown"), (), drawn)
        self._output.show({"text/html": fragment, "text/plain": what})


def picture_of(climb: Climb) -> Markup:
    """Each try as a row, as on the bench; empty before the cell as written was measured."""
    if climb.baseline is None or climb.baseline.facts is None:
        return Markup()
    rows = Bench("", (with_run(Row("0"), climb.baseline),))
    for rung in climb.rungs:
        rows = rows.with_attempt(rung, str(rung.number), origin(rung))
    return bench.picture(bench.ordered(rows.with_climb(climb)))
