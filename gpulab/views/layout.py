"""The building blocks of a report: titled tables of plain strings, which each view lays out in its own way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Self

from msgspec import Struct
from msgspec.structs import replace

Fit = Literal["tight", "number", "wrap", "cut", "code"]


class Column(Struct, frozen=True):
    """A column's title and how its cells use space: as is, right-aligned, wrapped, or cut (`code` in monospace)."""

    title: str
    fit: Fit = "tight"


def numbers(*titles: str) -> tuple[Column, ...]:
    """Columns of figures."""
    return tuple(Column(title, "number") for title in titles)


class Row(Struct, frozen=True):
    """One line of a table. `bar` is a share from 0 to 1, drawn in `colour`; `full` is the first cell uncut.

    A `detail` explains the rows above it. The first screen of a terminal leaves it out; HTML folds it away in a leading
    table of two columns and shows it in all others. `lesson` is the lesson to which the last cell links.
    """

    cells: tuple[str, ...]
    bar: float | None = None
    colour: str = ""
    full: str = ""
    detail: bool = False
    lesson: str = ""


class Section(Struct, frozen=True):
    """A titled table and the sentences under it. A table whose column titles are all empty is shown without a head.

    The first screen shows a `lead` and `code` open; of every other section it shows only the title and `result`, the
    section in one line. `aside` marks sections about the measurement itself: they are folded together, at the end.
    `wide` needs the whole width of a page. `code` is printed below the sentences, each line as is. A `pictured` section
    repeats the picture in words, so it is folded where there is a picture. `drawing` is HTML above the table; text
    output omits it. A `text_only` section appears only in the full text.
    """

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[Row, ...] = ()
    lines: tuple[str, ...] = ()
    aside: bool = False
    wide: bool = False
    lead: bool = False
    code: str = ""
    result: str = ""
    pictured: bool = False
    drawing: str = ""
    text_only: bool = False

    @property
    def has_head(self) -> bool:
        """Whether any column has a title."""
        return any(column.title for column in self.columns)

    @property
    def has_bars(self) -> bool:
        """Whether any row has a bar."""
        return any(row.bar is not None for row in self.rows)

    @property
    def summary_rows(self) -> tuple[Row, ...]:
        """The rows without their details."""
        return tuple(row for row in self.rows if not row.detail)

    @property
    def details(self) -> tuple[Row, ...]:
        """The rows that a leading table of pairs folds below its other rows."""
        return tuple(row for row in self.rows if row.detail) if self.lead and self.columns == PAIRS else ()

    @property
    def in_short(self) -> str:
        """The section in one line: its result or, without one, its first row or sentence."""
        if self.result:
            return self.result
        if self.rows:
            first, *figures = (cell.strip() for cell in self.rows[0].cells)
            return f"{first}: {' · '.join(filter(None, figures))}" if any(figures) else first
        return self.lines[0].partition(". ")[0].rstrip(".") if self.lines else ""

    @classmethod
    def table(
        cls,
        title: str,
        columns: Iterable[Column],
        cells: Iterable[tuple[str, ...]],
        lines: Iterable[str] = (),
        *,
        aside: bool = False,
        wide: bool = False,
        result: str = "",
    ) -> Self:
        """A table of texts, without bars."""
        rows = tuple(Row(line) for line in cells)
        return cls(title, tuple(columns), rows, tuple(lines), aside, wide, result=result)


def leading(section: Section | None) -> Section | None:
    """The section, marked to be open on the first screen."""
    return replace(section, lead=True) if section is not None else None


def present(*sections: Section | None) -> tuple[Section, ...]:
    """The sections that are not None, in order."""
    return tuple(section for section in sections if section is not None)


PAIRS = (Column(""), Column("", "wrap"))
TEXTS = (Column("", "wrap"), Column("", "wrap"))
