"""What was found about a run, to look at on its own: in a terminal, in a notebook, as data."""

from __future__ import annotations

from dataclasses import dataclass

from gpulab.diagnosis.finding import Diagnosis, Finding, Undetermined
from gpulab.diagnosis.headline import Headline, headline
from gpulab.views.layout import Section, present
from gpulab.views.report import document
from gpulab.views.report.findings import documents, finding_sections, untold_section
from gpulab.views.view import View


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
        return headline(self.first, self.result.alarm)

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
