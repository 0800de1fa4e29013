"""The report for a terminal: the same words as on the page, in columns of characters."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Container, Iterable, Iterator, Sequence

import msgspec

from gpulab.diagnosis.headline import Headline
from gpulab.views import wording
from gpulab.views.layout import Column, Row, Section

WIDEST = 100
NARROWEST = 60
_BAR = 16
_LEAST = 8  # characters that a column keeps
_MOST_WITH_BARS = 6  # columns: a wider table has no room for bars
_READABLE = 24  # characters: the text of a narrower column is printed below its row
_GAP = "  "
_INDENT = "  "
FIRST_SCREEN = 25  # lines: what a terminal shows at once
_LINES_OF_A_ROW = 2  # per row on the first screen
_LONGEST_WORD = 24  # letters: a longer word is a name, recognizable by its beginning
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z])")


def render(opening: str, headline: Headline, sections: Sequence[Section], width: int | None = None) -> str:
    """The whole report, no line but code longer than `width` (60 to 100, 100 by default), no colour, no escapes."""
    width = min(max(width or WIDEST, NARROWEST), WIDEST)
    blocks = [_head(opening, headline, width)]
    blocks += ["\n".join(section_lines(section, width)) for section in sections]
    return "\n\n".join(blocks) + "\n"


def first_screen(
    opening: str, headline: Headline, sections: Sequence[Section], more: str, width: int | None = None
) -> str:
    """Headline, what leads, and one line of every other section: at most 25 lines. `more` says how to see the rest.

    What does not fit is left out from the end: first the other sections, then the last rows of the leading sections.
    """
    width = min(max(width or WIDEST, NARROWEST), WIDEST)
    last = ["", *_wrapped(more, width)]
    room = FIRST_SCREEN - len(last)
    lines = _head(opening, headline, width).split("\n")
    folded = []
    for section in sections:
        whole = ["", *"\n".join(_short_section(section, width)).split("\n")] if section.lead or section.code else []
        if section.lead or (section.code and len(lines) + len(whole) <= room):
            lines += whole
        elif not section.aside:
            folded.append(_short(section, width))
    lines = lines[:room]
    if folded and room - len(lines) >= 2:
        lines += ["", *folded[: room - len(lines) - 1]]
    return "\n".join([*lines, *last]) + "\n"


def _short_section(section: Section, width: int) -> Iterator[str]:
    """A leading section without its details, no row longer than two lines; a wide table also without its notes."""
    if len(section.columns) != 2:
        rows = section.summary_rows
        yield from section_lines(msgspec.structs.replace(section, rows=rows, lines=()) if rows else section, width)
        return
    yield wording.cut(section.title, width).upper()
    rows = section.summary_rows
    label = max((len(row.cells[0]) for row in rows), default=0)
    for row in rows:
        for i, line in enumerate(_whole_sentences(row.cells[-1], width - label - 4) or [""]):
            yield f"{_INDENT}{(row.cells[0] if i == 0 else '').ljust(label)}{_GAP}{line}".rstrip()
    for line in section.lines:
        yield from _wrapped(line, width, _INDENT)
    if section.code:
        yield from (f"{_INDENT}{line}" for line in section.code.split("\n"))


def _whole_sentences(text: str, width: int) -> list[str]:
    """The sentences that fit into the lines of a row, always whole, at least the first: half an advice is useless."""
    sentences = _SENTENCE_END.split(text)
    lines = textwrap.wrap(sentences[0], width)
    for count in range(2, len(sentences) + 1):
        more = textwrap.wrap(" ".join(sentences[:count]), width)
        if len(more) > _LINES_OF_A_ROW:
            break
        lines = more
    return lines


def _cut_at_a_word(text: str, width: int) -> str:
    """At most `width` characters; an enumeration does not end with a figure whose noun was cut off."""
    if len(text) <= width:
        return text
    words = text[: width - 1].rpartition(" ")[0]
    if len(text[len(words) :].split(" ", 2)[1]) > _LONGEST_WORD:
        return wording.cut(text, width)
    last = words.rpartition(", ")
    if last[0] and not any(letter.isalpha() for letter in last[2]):
        words = last[0]
    return f"{words.rstrip(' ,;:')} …" if len(words) > width // 2 else wording.cut(text, width)


def _short(section: Section, width: int) -> str:
    """The section's title and result; for an edit, the lines that it adds."""
    added = [line for line in section.code.split("\n") if line.startswith("+") and not line.startswith("+++")]
    return _cut_at_a_word(f"{_INDENT}{section.title}: {' '.join(added) or section.in_short}", width)


def _head(opening: str, headline: Headline, width: int) -> str:
    lines = _wrapped(f"gpulab · {opening}", width)
    lines += ["", *_wrapped(wording.plain(headline.sentence), width, _INDENT)]
    lines += _wrapped(wording.plain(headline.evidence), width, _INDENT)
    return "\n".join(lines)


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent) if text else []


def section_lines(section: Section, width: int = WIDEST) -> Iterator[str]:
    """One section: its title, its table and its sentences."""
    yield wording.cut(section.title, width).upper()
    yield from _table(section, width)
    for line in section.lines:
        yield from _wrapped(line, width, _INDENT)
    if section.code:
        yield f"\n{section.code}"


def _table(section: Section, width: int) -> Iterator[str]:
    if not section.rows:
        return
    barred = len(section.columns) <= _MOST_WITH_BARS and section.has_bars
    room = width - len(_INDENT) - (_BAR + len(_GAP) if barred else 0)
    columns, widths = section.columns, _column_widths(section, room)
    longest = max(len(row.cells[-1]) for row in section.rows)
    readable = 2 * _READABLE if section.wide else _READABLE
    below = len(columns) > 2 and columns[-1].fit == "wrap" and widths[-1] < min(readable, longest)
    if below:
        columns = columns[:-1]
        widths = _column_widths(msgspec.structs.replace(section, columns=columns), room)
    if section.has_head:
        yield from _lines([column.title for column in columns], columns, widths, " " * _BAR if barred else None)
    for row in section.rows:
        yield from _lines(row.cells[: len(columns)], columns, widths, _bar(row) if barred else None)
        if below:
            yield from _wrapped(row.cells[-1], width, 2 * _INDENT)


def _bar(row: Row) -> str:
    eighths = round(8 * _BAR * min(max(row.bar or 0, 0), 1))
    if row.bar and not eighths:
        eighths = 1
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(_BAR)


def _column_widths(section: Section, room: int) -> list[int]:
    """Natural widths; if they do not fit, columns that wrap or are cut shrink first, then the other texts."""
    columns = section.columns
    widths = [
        max([len(column.title), *(len(row.cells[i]) for row in section.rows)]) for i, column in enumerate(columns)
    ]
    room -= len(_GAP) * (len(columns) - 1)
    yielding = [i for i, column in enumerate(columns) if column.fit in ("wrap", "cut", "code")]
    _shrink(widths, yielding, room, _LEAST)
    _shrink(widths, [i for i, column in enumerate(columns) if column.fit != "number"], room, _LEAST)
    return widths


def _shrink(widths: list[int], yielding: list[int], room: int, least: int) -> None:
    """Take one character at a time from the widest of the `yielding` columns until all fit or all are at `least`."""
    while sum(widths) > room and (able := [i for i in yielding if widths[i] > least]):
        widths[max(able, key=lambda i: widths[i])] -= 1


def _lines(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int], bar: str | None) -> Iterator[str]:
    stacks = [_fit(cell, column, w) for cell, column, w in zip(cells, columns, widths, strict=True)]
    for i in range(max(len(stack) for stack in stacks)):
        fields = []
        for stack, column, w in zip(stacks, columns, widths, strict=True):
            piece = stack[i] if i < len(stack) else ""
            fields.append(piece.rjust(w) if column.fit == "number" else piece.ljust(w))
        if bar is not None:
            fields.insert(1, bar if i == 0 else " " * _BAR)
        yield (_INDENT + _GAP.join(fields)).rstrip()


def _fit(cell: str, column: Column, width: int) -> list[str]:
    if column.fit == "wrap":
        return textwrap.wrap(cell, width) or [""]
    return [wording.cut(cell, width)]


def aligned(titles: Sequence[str], rows: Iterable[Sequence[str]], numbers: Container[str]) -> list[str]:
    """A table of any width; the columns whose titles are among `numbers` are aligned on the right."""
    lines = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        _GAP.join(
            cell.rjust(width) if title in numbers else cell.ljust(width)
            for title, cell, width in zip(titles, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]
