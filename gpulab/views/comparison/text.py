"""A comparison for a terminal: the words of the page, and the edit to paste as it is."""

from __future__ import annotations

from collections.abc import Sequence

from gpulab.diagnosis.headline import Headline
from gpulab.views import text
from gpulab.views.comparison.sections import Keep
from gpulab.views.layout import Section


def render(
    opening: str, headline: Headline, sections: Sequence[Section], keep: Keep | None, width: int | None = None
) -> str:
    """The whole, no line longer than `width` (60 to 100, 100 by default) but the code to keep, which stays whole."""
    kept = [Section("Keep it", lines=(keep.sentence,))] if keep is not None else []
    shown = text.render(opening, headline, [*sections, *kept], width)
    return f"{shown}\n{keep.code}\n" if keep is not None else shown
