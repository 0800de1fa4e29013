"""One report of one run, and each way to show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpulab.analysis.facts import Facts
from gpulab.analysis.steps import StepChange
from gpulab.diagnosis.diagnose import Headline, headline
from gpulab.diagnosis.finding import Diagnosis, Finding, Undetermined
from gpulab.formatting import capitalized, duration, plural, speedup
from gpulab.views.layout import Section, present
from gpulab.views.report import document
from gpulab.views.report.findings import documents, finding_sections, untold_section
from gpulab.views.report.html_figure import picture
from gpulab.views.report.sections import more, opening, sections
from gpulab.views.report.timeline_page import timeline_section
from gpulab.views.view import View
from gpulab.views.wording import plain

if TYPE_CHECKING:
    from gpulab.tuning.bench import Speed


@dataclass(frozen=True, slots=True)
class Report(View):
    """What a run says about itself: the facts and the diagnosis with their views.

    `unsaved` is the reason why the run is not on disk (a sentence for the user), or empty where it is. `change`: what
    its settings did to the step, where its baseline was measured before; `speed`: what interleaved blocks say instead.
    """

    facts: Facts
    diagnosis: Diagnosis
    unsaved: str = ""
    change: StepChange | None = None
    speed: Speed | None = None

    @property
    def headline(self) -> Headline:
        """The first finding's sentence, its evidence and its level."""
        return headline(self.diagnosis, self._before())

    def json(self) -> dict[str, object]:
        """The figures as plain data for `json.dumps`; None is "not measurable"."""
        return document.document(self.facts, self.diagnosis, self._before())

    def _before(self) -> str:
        """ "84.0 ms per step; baseline: 179 ms.", after what had no effect; empty for a run of the baseline.

        Blocks that were interleaved say it better than one run each, and there is one figure for it.
        """
        changes, change, speed = self.facts.run.changes, self.change, self.speed
        words = [f"{c.name}={c.value} had no effect: {plain(c.evidence)}." for c in changes if c.state == "no effect"]
        if changes and len(words) == len(changes):
            return " ".join(words)
        if speed is not None and speed.times_as_fast is not None:
            times = speedup(speed.times_as_fast, speed.times_as_fast_interval, ("speedup {}", ""))
            pairs = f"{plural(speed.pairs, 'pair')} of interleaved blocks"
            words.append(f"{capitalized(speed.verdict)}: {times} per {speed.per} over the baseline, in {pairs}.")
        elif change is not None:
            words.append(f"{duration(change.now_us)} per {change.unit}; baseline: {duration(change.before_us)}.")
            words += [f"One-time cost: {duration(change.setup_s * 1e6)}."] if change.setup_s is not None else []
        return " ".join(words)

    def _opening(self) -> str:
        return opening(self.facts)

    def _more(self) -> str:
        return more(self.facts.run, self.unsaved)

    def _sections(self) -> tuple[Section, ...]:
        causes = finding_sections(self.diagnosis, below_headline=True, source=self.facts.run.source)
        return (*causes, *sections(self.facts, self.unsaved, untold_section(self.diagnosis)))

    def _picture(self) -> str:
        return picture(self.facts)

    def _timeline(self) -> str:
        return timeline_section(self.facts.run, self.facts.breakdown)


# What was found about a run, to look at on its own: in a terminal, in a notebook, as data.


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosed(View):
    """A diagnosis with its views. `opening` is one line: what was run, and where.

    `findings` are ranked by the time they would give back per step; the first makes the headline.
    """

    result: Diagnosis
    opening: str = ""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """At least one, if only `healthy` or `cannot_tell`."""
        return self.result.findings

    @property
    def untold(self) -> tuple[Undetermined, ...]:
        """What could not be told, and what to record for it."""
        return self.result.untold

    @property
    def first(self) -> Finding:
        """The one that the headline is about."""
        return self.result.first

    @property
    def step_us(self) -> float | None:
        """The typical step, in µs."""
        return self.result.step_us

    @property
    def headline(self) -> Headline:
        """The sentence, its evidence and its level."""
        return headline(self.result)

    def of(self, key: str) -> Finding | None:
        """The finding of that key, or None."""
        return self.result.of(key)

    def json(self) -> dict[str, object]:
        """`findings` and `untold` as plain data for `json.dumps`; None is "not measurable"."""
        return document.plain_data(documents(self.result))

    def __repr__(self) -> str:
        return self.text().rstrip("\n")

    def _opening(self) -> str:
        return self.opening

    def _sections(self) -> tuple[Section, ...]:
        return present(*finding_sections(self.result, below_headline=True), untold_section(self.result))
