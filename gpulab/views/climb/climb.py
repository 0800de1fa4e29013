"""One climb, and each way to show it."""

from __future__ import annotations

from dataclasses import dataclass

from gpulab.diagnosis.headline import Headline
from gpulab.tuning.climb.record import Climb, Rung
from gpulab.views.climb import document, sections
from gpulab.views.comparison import html as comparison_html
from gpulab.views.comparison import text as comparison_text


@dataclass(frozen=True, slots=True, repr=False)
class Climbed:
    """A climb with its views: every view is a pure function of it. A notebook shows it by its name."""

    found: Climb

    @property
    def kept(self) -> dict[str, str]:
        """The settings that were kept."""
        return self.found.kept

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """Every try, in order."""
        return self.found.rungs

    @property
    def ratio(self) -> float | None:
        """Time of all kept settings over the cell as written: below 1 is faster; None where they were not compared."""
        return self.found.whole.ratio if self.found.whole is not None else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the ratio."""
        return self.found.whole.interval if self.found.whole is not None else None

    @property
    def edit(self) -> str:
        """What makes all kept settings permanent: a diff of the cell, or a snippet; empty where nothing was kept."""
        keep = sections.kept_edit(self.found)
        return keep.code if keep is not None else ""

    @property
    def headline(self) -> Headline:
        """The sentence, its evidence and its level."""
        return sections.headline(self.found)

    def text(self, width: int | None = None) -> str:
        """For a terminal, at most `width` columns (60 to 100; None: 100)."""
        found = self.found
        keep = sections.kept_edit(found)
        return comparison_text.render(
            sections.opening(found), self.headline, sections.sections(found, bars=False), keep, width
        )

    def html(self) -> str:
        """A self-contained page: no network."""
        found = self.found
        keep = sections.kept_edit(found)
        return comparison_html.page(sections.opening(found), self.headline, sections.sections(found), b"", keep)

    def fragment(self) -> str:
        """Headline, ladder and edit for a notebook's output: inline styles only."""
        keep = sections.kept_edit(self.found)
        return comparison_html.fragment(self.headline, sections.sections(self.found), keep)

    def json(self) -> dict[str, object]:
        """The figures as plain data for `json.dumps`; None is "not measurable"."""
        return document.document(self.found)

    def bundle(self) -> dict[str, object]:
        """A display bundle: tables, and the text for front ends without them."""
        return {"text/html": self.fragment(), "text/plain": self.text()}

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, object]:
        return self.bundle()

    def __repr__(self) -> str:
        return f"<climb: {self.headline.sentence}>"


__all__ = ["Climbed"]
