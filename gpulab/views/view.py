"""The base of every result with a display: the same sections as text, as a page and in a notebook."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape
from msgspec import Struct

from gpulab.diagnosis.headline import Headline
from gpulab.formatting import plain_values
from gpulab.views import page, text
from gpulab.views.layout import Section


class View(ABC):
    """A result with its views; every view is a pure function of it. A notebook displays it as a cell's last value."""

    __slots__ = ()

    @property
    @abstractmethod
    def headline(self) -> Headline:
        """The sentence, its evidence and its level."""

    @abstractmethod
    def _opening(self) -> str:
        """The subject of the report, in one line."""

    @abstractmethod
    def _sections(self) -> tuple[Section, ...]:
        """Everything below the headline, in reading order."""

    @abstractmethod
    def _figures(self) -> Mapping[str, object]:
        """The JSON document, built from records and JSON values."""

    def _picture(self) -> Markup:
        """The picture of a page and of a notebook's output; may be empty."""
        return Markup()

    def _timeline(self) -> Markup:
        """The timeline of a page; may be empty."""
        return Markup()

    def _more(self) -> str:
        """The hint how to see what the first screen omits."""
        return "The rest: .text(full=True), or .html() as a page."

    def _more_in_python(self, call: str) -> str:
        """The same hint as a line of Python; it imports gpulab if the user has not, e.g. after `%load_ext gpulab`."""
        bound = getattr(sys.modules.get("__main__"), "gpulab", None) is sys.modules["gpulab"]  # IPython's variables
        return f"The rest: {'' if bound else 'import gpulab; '}print(gpulab.{call}.text(full=True))"

    def text(self, width: int | None = None, *, full: bool = False) -> str:
        """The report for a terminal, at most `width` columns (60 to 100; None: 100), 25 lines, or all if `full`."""
        if full:
            return text.render(self._opening(), self.headline, self._sections(), width)
        return text.first_screen(self._opening(), self.headline, self._sections(), self._more(), width)

    def html(self) -> str:
        """A self-contained page: no network, the picture inside."""
        return page.page(self._opening(), self.headline, self._sections(), self._picture(), self._timeline())

    def json(self) -> dict[str, object]:
        """The figures as plain data for `json.dumps`; None is "not measurable"."""
        figures: dict[str, object] = plain_values(self._figures())
        return figures

    def fragment(self, *, full: bool = False) -> str:
        """HTML for a notebook's output: headline, picture, the costliest finding, all else folded (open if `full`)."""
        return page.fragment(self.headline, self._sections(), self._picture(), full=full)

    def bundle(self, *, full: bool = False) -> dict[str, object]:
        """A display bundle: HTML, and the text for front ends without it."""
        return {"text/html": self.fragment(full=full), "text/plain": self.text(full=full)}

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, object]:
        return self.bundle()


class Listing(Struct, frozen=True):
    """Tables of texts with their titles, and sentences below the tables: as text, and as HTML in a notebook.

    Columns whose titles are among `numbers` are aligned on the right.
    """

    tables: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]]
    lines: Sequence[str]
    numbers: Sequence[str] = ()

    def __repr__(self) -> str:
        tables = ["\n".join(text.aligned(*table, self.numbers)) for table in self.tables]
        return "\n\n".join(filter(None, [*tables, "\n".join(self.lines)]))

    def _repr_html_(self) -> str:
        tables = [page.plain_table(*table, self.numbers) for table in self.tables]
        return "".join([*tables, *(f'<p style="margin:0.3em 0">{escape(line)}</p>' for line in self.lines)])


def as_json(view: View) -> str:
    """The JSON document as text."""
    return json.dumps(view.json(), indent=2, allow_nan=False) + "\n"


class Answer(Struct, frozen=True):
    """The output of a command: a view, a text, anything with a `repr`. `status` is its exit status at a terminal.

    `notes` are sentences about written files, in place of the view; `complaints` go to the error output. If `silent`,
    nothing is printed.
    """

    content: Any = ""
    status: int = 0
    notes: tuple[str, ...] = ()
    complaints: tuple[str, ...] = ()
    silent: bool = False
