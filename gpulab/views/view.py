"""What every result has in common that can be shown: the same sections as text, as a page and in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gpulab.diagnosis.headline import Headline
from gpulab.views import html, text
from gpulab.views.layout import Section


class View(ABC):
    """A result with its views: every view is a pure function of it."""

    __slots__ = ()

    @property
    @abstractmethod
    def headline(self) -> Headline:
        """The sentence, its evidence and its level."""

    @abstractmethod
    def _opening(self) -> str:
        """What this is about, in one line."""

    @abstractmethod
    def _sections(self) -> tuple[Section, ...]:
        """Everything below the headline, in reading order."""

    def _picture(self) -> bytes:
        """The picture of a page as PNG; empty where there is none."""
        return b""

    def _timeline(self) -> str:
        """The timeline of a page as HTML; empty where there is none."""
        return ""

    def _more(self) -> str:
        """How to see what the first screen leaves out."""
        return "The rest: .text(full=True), or .html() as a page."

    def text(self, width: int | None = None, *, full: bool = False) -> str:
        """For a terminal, at most `width` columns (60 to 100; None: 100): at most 25 lines, or all where `full`."""
        if full:
            return text.render(self._opening(), self.headline, self._sections(), width)
        return text.first_screen(self._opening(), self.headline, self._sections(), self._more(), width)

    def html(self) -> str:
        """A self-contained page: no network, the picture inside."""
        return html.page(self._opening(), self.headline, self._sections(), self._picture(), self._timeline())

    def fragment(self) -> str:
        """Headline and tables for a notebook's output: inline styles only, so that untrusted notebooks keep them."""
        return html.fragment(self.headline, self._sections())


class Pictured(View):
    """A result whose picture stands for it in a notebook."""

    __slots__ = ()

    @abstractmethod
    def png(self) -> bytes:
        """The picture, 1100 pixels wide. Draws with matplotlib, on the main thread only."""

    def bundle(self) -> dict[str, object]:
        """The picture as a display bundle, with the text for front ends without pictures."""
        return {"image/png": html.encoded(self.png()), "text/plain": self.text()}


class NotebookView(View):
    """A result that a notebook shows by its name."""

    __slots__ = ()

    def bundle(self) -> dict[str, object]:
        """A display bundle: tables, and the text for front ends without them."""
        return {"text/html": self.fragment(), "text/plain": self.text()}

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, object]:
        return self.bundle()
