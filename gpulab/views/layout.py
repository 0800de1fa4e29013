"""What a report is made of: titled tables of plain strings, which each view lays out in its own way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self

Fit = Literal["tight", "number", "wrap", "cut"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column's title and how its cells use the room: as they are, right-aligned, wrapped, or cut to fit."""

    title: str
    fit: Fit = "tight"


def numbers(*titles: str) -> tuple[Column, ...]:
    """Columns of figures."""
    return tuple(Column(title, "number") for title in titles)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table. `bar` is a share from 0 to 1, drawn in `colour`; `full` is the first cell uncut."""

    cells: tuple[str, ...]
    bar: float | None = None
    colour: str = ""
    full: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A titled table and the sentences under it. A table whose column titles are all empty is shown without a head.

    `aside` marks what most readers skip: a page may fold it. `wide` needs the whole width of a page. `lead` belongs to
    the headline: a page shows it before its picture. `code` stands below the sentences, each line as it is.
    """

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[Row, ...] = ()
    lines: tuple[str, ...] = ()
    aside: bool = False
    wide: bool = False
    lead: bool = False
    code: str = ""

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
    ) -> Self:
        """A table of texts, without bars."""
        return cls(title, tuple(columns), tuple(Row(line) for line in cells), tuple(lines), aside, wide)


def present(*sections: Section | None) -> tuple[Section, ...]:
    """The sections that there are, in order."""
    return tuple(section for section in sections if section is not None)


PAIRS = (Column(""), Column("", "wrap"))
TEXTS = (Column("", "wrap"), Column("", "wrap"))
