"""One climb, and each way to show it."""

from __future__ import annotations

from dataclasses import dataclass

from gpulab.diagnosis.headline import Headline
from gpulab.tuning.climb.record import Attempt, Climb
from gpulab.views.climb import document, html_figure, sections
from gpulab.views.layout import Section
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
        """Time of all kept settings over the cell as written: below 1 is faster; None where they were not compared."""
        return self.result.whole.ratio if self.result.whole is not None else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the ratio."""
        return self.result.whole.interval if self.result.whole is not None else None

    @property
    def edit(self) -> str:
        """What makes all kept settings permanent: a diff of the cell, or a snippet; empty where nothing was kept."""
        keep = sections.kept_edit(self.result)
        return keep.code if keep is not None else ""

    @property
    def headline(self) -> Headline:
        """The sentence, its evidence and its level."""
        return sections.headline(self.result)

    def json(self) -> dict[str, object]:
        """The figures as plain data for `json.dumps`; None is "not measurable"."""
        return document.document(self.result)

    def __repr__(self) -> str:
        return f"<climb: {self.headline.sentence}>"

    def _opening(self) -> str:
        return sections.opening(self.result)

    def _more(self) -> str:
        return "The rest: print(gpulab.climbs[-1].text(full=True))"

    def _picture(self) -> str:
        return html_figure.picture_of(self.result)

    def _sections(self) -> tuple[Section, ...]:
        return sections.sections(self.result)
