"""One report of one run, and each way to show it."""

from __future__ import annotations

import base64
from dataclasses import dataclass

from gpulab.analysis.facts import Facts
from gpulab.diagnosis.finding import Diagnosis
from gpulab.diagnosis.headline import Headline, headline
from gpulab.views import html, text
from gpulab.views.layout import Section
from gpulab.views.report import document, figure
from gpulab.views.report.findings import finding_sections, untold_sections
from gpulab.views.report.sections import opening, sections
from gpulab.views.report.timeline_page import timeline_section


@dataclass(frozen=True, slots=True)
class Report:
    """What a run says about itself: every view is a pure function of the facts and the diagnosis.

    `unsaved` is the reason why the run is not on disk (a sentence for the user), or empty where it is.
    """

    facts: Facts
    diagnosis: Diagnosis
    unsaved: str = ""

    @property
    def headline(self) -> Headline:
        """The first finding's sentence, its evidence and its level."""
        return headline(self.diagnosis.first)

    def text(self, width: int | None = None) -> str:
        """The report for a terminal, at most `width` columns (60 to 100; None: 100)."""
        return text.render(opening(self.facts), self.headline, self._sections(), width)

    def png(self) -> bytes:
        """The picture, 1100 by 800 pixels. Draws with matplotlib, on the main thread only."""
        return figure.draw(self.facts, self.headline)

    def html(self) -> str:
        """A self-contained page: no network, the picture inside, and every span of the trace to pan and zoom."""
        picture, timeline = figure.draw(self.facts, None), timeline_section(self.facts.run, self.facts.breakdown)
        return html.page(opening(self.facts), self.headline, self._sections(), picture, timeline)

    def fragment(self) -> str:
        """Headline and tables for a notebook's output: inline styles only, so that untrusted notebooks keep them."""
        return html.fragment(self.headline, self._sections())

    def json(self) -> dict[str, object]:
        """The figures as plain data for `json.dumps`; None is "not measurable"."""
        return document.document(self.facts, self.diagnosis)

    def bundle(self) -> dict[str, object]:
        """The picture as a display bundle, with the text report for front ends without pictures."""
        return {"image/png": base64.b64encode(self.png()).decode("ascii"), "text/plain": self.text()}

    def _sections(self) -> tuple[Section, ...]:
        found = finding_sections(self.diagnosis, below_headline=True)
        return (*found, *sections(self.facts, self.unsaved, untold_sections(self.diagnosis)))
