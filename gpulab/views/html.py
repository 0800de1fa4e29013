"""The report as HTML: a page that stands alone, and tables for a notebook's output. Every text is escaped here."""

from __future__ import annotations

import html
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from gpulab.diagnosis.diagnose import Headline
from gpulab.views import wording
from gpulab.views.bars import safe, static
from gpulab.views.layout import PAIRS, Column, Row, Section
from gpulab.views.wording import lesson_path

Look = Mapping[str, str]  # element of a section → the attributes of its tag

_BAR_PX = 160
_LONGEST = 90  # characters of a name that may be cut; the whole name is the cell's hint
_SHORT = 16  # characters of a cell that is not broken

_PAGE: Look = MappingProxyType(
    {
        "table": "",
        "row": "",
        "head": "",
        "head number": 'class="number"',
        "cell": "",
        "cell number": 'class="number"',
        "cell short": 'class="short"',
        "cell first": 'class="first"',
        "bar cell": 'class="bar"',
        "bar": 'class="fill"',
        "line": 'class="note"',
        "more": 'class="more"',
    }
)

_CELL = "padding:3px 14px 3px 0;border:0;vertical-align:top;background:transparent;"
_WRAPS = "text-align:left;max-width:620px;overflow-wrap:anywhere"
_INLINE: Look = MappingProxyType(
    {
        "table": 'style="border-collapse:collapse;margin:2px 0 6px 0;font-size:13px;width:auto"',
        "row": 'style="background:transparent"',
        "head": f'style="{_CELL}text-align:left;font-weight:normal;opacity:0.75"',
        "head number": f'style="{_CELL}text-align:right;font-weight:normal;opacity:0.75;white-space:nowrap"',
        "cell": f'style="{_CELL}{_WRAPS}"',
        "cell number": f'style="{_CELL}text-align:right;white-space:nowrap"',
        "cell short": f'style="{_CELL}text-align:left;white-space:nowrap"',
        "cell first": f'style="{_CELL}{_WRAPS};font-weight:500"',
        "bar cell": f'style="{_CELL}text-align:left;min-width:{_BAR_PX}px"',
        "bar": "",
        "line": 'style="margin:2px 0;font-size:13px;opacity:0.8"',
        "more": 'style="margin:2px 0;font-size:13px"',
    }
)
_LEVELS = MappingProxyType({"bad": "#D9661F", "notice": "#C29A16", "good": "#1E9E77", "unknown": "#8A8A8A"})
_HEADLINE = "font-size:16px;line-height:1.35;font-weight:600;overflow-wrap:anywhere"
_NARROW = "560px"
# Of an output in a narrow place: each row one below the other, each figure with its column's title.
_STACKED = """
.SCOPE TABLE, .SCOPE TABLE tbody, .SCOPE TABLE tr, .SCOPE TABLE td { display: block !important;
  text-align: left !important; width: auto !important; min-width: 0 !important; max-width: none !important;
  white-space: normal !important; }
.SCOPE TABLE thead { display: none !important; }
.SCOPE TABLE tr { padding: 5px 0 !important; border-top: 1px solid rgba(128,128,128,0.25) !important; }
.SCOPE TABLE td { padding: 0 !important; border: 0 !important; }
.SCOPE TABLE td:first-child { font-weight: 600; }
.SCOPE TABLE td[data-title]::before { content: attr(data-title) ": "; opacity: 0.75; }
.SCOPE .gpulab-source th:nth-child(2), .SCOPE .gpulab-source td:nth-child(2) { display: none !important; }
""".replace("TABLE", "table:not(.gpulab-source, .gp-rows)")  # source stays a table, without bars; rows have their own
_FRAGMENT_STYLE = f"""<style>.gpulab {{ container-type: inline-size; }}
@container (max-width: {_NARROW}) {{{_STACKED.replace("SCOPE", "gpulab")}}}</style>"""

_CODE = (
    "margin:8px 0 0 0;padding:10px 14px;font:13px/1.5 ui-monospace,Menlo,Consolas,monospace;"
    "white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere;"
    "border:1px solid rgba(128,128,128,0.35);border-radius:8px;background:rgba(128,128,128,0.08)"
)
_SOURCE = "font:13px/1.5 ui-monospace,Menlo,monospace;background:none;color:inherit;padding:0;white-space:pre-wrap"
_GROUNDS = {"+": "rgba(46,158,91,0.25)", "-": "rgba(217,83,79,0.25)"}  # under any ink, light or dark

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(opening: str, headline: Headline, sections: Sequence[Section], picture: str, timeline: str = "") -> str:
    """A self-contained page: no request, the picture inside, light and dark; no script but that of `timeline`.

    Headline, picture and what leads come first; every other section is folded, with its result beside its title.
    """
    from gpulab.views.report.timeline_page import script_policy  # a table of runs does without the timeline

    sentence, evidence, run = safe(headline.sentence), safe(headline.evidence), safe(opening)
    policy = _POLICY + (f"; script-src {script_policy()}" if timeline else "")
    stacked = _STACKED.replace(".SCOPE", "section:not(.gpulab-timeline)")
    style = "\n" + static("page.css").replace("STACKED", stacked).replace("NARROW", _NARROW) + _rows_style(picture)
    sections = [section for section in sections if not section.text_only]
    shown = f'<div class="picture">{picture}</div>' if picture else ""
    opened = [section for section in sections if _is_open(section, picture)]
    lead = "\n".join(_page_section(section) for section in sorted(opened, key=lambda s: not s.lead))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{sentence} · gpulab</title>
<style>{style}</style>
</head>
<body>
<main>
<header class="{safe(headline.level)}">
<p class="run">gpulab · {run}</p>
<h1>{sentence}</h1>
<p class="evidence">{evidence}</p>
</header>
{shown}
{lead}
{timeline}
{_page_folds(sections, picture)}
</main>
</body>
</html>
"""


def fragment(headline: Headline, sections: Sequence[Section], picture: str = "", *, full: bool = False) -> str:
    """The first screen for a notebook's output, with all else folded below it; where `full`, nothing is folded.

    Inline styles only, and no colour of text: what notebooks keep of an output they do not trust, in any theme. The one
    style sheet is for narrow places.
    """
    sections = [section for section in sections if not section.text_only]
    level = _LEVELS.get(headline.level, _LEVELS["unknown"])
    head = (
        f'<div style="border-left:4px solid {level};padding:1px 0 1px 12px;margin:6px 0 8px">'
        f'<div style="{_HEADLINE}">{safe(headline.sentence)}</div>'
        f'<div style="font-size:14px;opacity:0.85;overflow-wrap:anywhere">{safe(headline.evidence)}</div></div>'
    )
    lead = "".join(fragment_section(section) for section in sections if _is_open(section, picture))
    rows = f"<style>{style}</style>" if (style := _rows_style(picture)) else ""
    return (
        f'<div class="gpulab" style="max-width:1100px;overflow-x:auto">{_FRAGMENT_STYLE}{rows}{head}{picture}{lead}'
        f"{_fragment_folds(sections, picture, full=full)}</div>"
    )


def _rows_style(picture: str) -> str:
    return static("rows.css") if "gp-rows" in picture else ""


def _is_open(section: Section, picture: str) -> bool:
    """Whether the first screen has it."""
    return bool(section.code) or (section.lead and not (section.pictured and picture))


_ABOUT = "About this measurement"
_WHY = "Why, and what to expect"


def _page_folds(sections: Sequence[Section], picture: str) -> str:
    folds = [
        f'<section class="fold"><details{" open" if s.drawing else ""}><summary><h2>{safe(s.title)}</h2>'
        f'<span class="result">{safe(s.in_short)}</span></summary>{"".join(_inside(s, _PAGE))}</details></section>'
        for s in sections
        if not (_is_open(s, picture) or s.aside)
    ]
    asides = "".join(f"<h3>{safe(s.title)}</h3>{''.join(_inside(s, _PAGE))}" for s in sections if s.aside)
    if asides:
        folds.append(f'<section class="fold"><details><summary><h2>{_ABOUT}</h2></summary>{asides}</details></section>')
    return "\n".join(folds)


def _fragment_folds(sections: Sequence[Section], picture: str, *, full: bool) -> str:
    folds = [
        _fold(safe(s.title), safe(s.in_short), "".join(_inside(s, _INLINE)), full=full)
        for s in sections
        if not (_is_open(s, picture) or s.aside)
    ]
    asides = "".join(fragment_section(s) for s in sections if s.aside)
    if asides:
        folds.append(_fold(_ABOUT, "", asides, full=full))
    return "".join(folds)


def _fold(title: str, result: str, inside: str, *, full: bool) -> str:
    beside = f' <span style="opacity:0.75;margin-left:6px">{result}</span>' if result else ""
    return (
        f'<details style="margin:3px 0;font-size:13px"{" open" if full else ""}>'
        f'<summary style="cursor:pointer;overflow-wrap:anywhere"><b>{title}</b>{beside}</summary>'
        f'<div style="padding:2px 0 8px 14px">{inside}</div></details>'
    )


def _page_section(section: Section) -> str:
    return f"<section><h2>{safe(section.title)}</h2>{''.join(_inside(section, _PAGE))}</section>"


def fragment_section(section: Section) -> str:
    """One section with inline styles only."""
    return f'<div style="margin:10px 0 0"><b>{safe(section.title)}</b>{"".join(_inside(section, _INLINE))}</div>'


def _inside(section: Section, look: Look) -> Iterator[str]:
    barred = any(row.bar is not None for row in section.rows)
    folds = section.lead and section.columns == PAIRS
    first = [row for row in section.rows if not (row.detail and folds)]
    details = [row for row in section.rows if row.detail and folds]
    if section.drawing:
        yield section.drawing
    if first:
        yield _table(section, first, look, barred)
    if details:
        table = _table(section, details, look, barred)
        summary = f'<summary style="cursor:pointer">{_WHY}</summary>'
        yield f"<details {look['more']}>{summary}{table}</details>"
    for line in section.lines:
        yield f"<p {look['line']}>{safe(line)}</p>"
    if section.code:
        lines = "\n".join(_code_line(line) for line in section.code.split("\n"))
        yield f'<pre style="{_CODE}">{lines}</pre>'


def _table(section: Section, rows: Sequence[Row], look: Look, barred: bool) -> str:
    body = "".join(_row(row, section.columns, look, barred) for row in rows)
    source = any(column.fit == "code" for column in section.columns)
    kind = ' class="gpulab-source"' if source else ""
    return f"<table{kind} {look['table']}>{_head(section, look, barred)}<tbody>{body}</tbody></table>"


def _code_line(line: str) -> str:
    """One line of code; of a diff on the ground of what it adds or takes away."""
    ground = _GROUNDS.get(line[:1]) if not line.startswith(("+++", "---")) else None
    safe = html.escape(line)
    return f'<span style="background:{ground}">{safe}</span>' if ground else safe


def _head(section: Section, look: Look, barred: bool) -> str:
    if not any(column.title for column in section.columns):
        return ""
    cells = [
        f"<th {look['head number' if column.fit == 'number' else 'head']}>{safe(column.title)}</th>"
        for column in section.columns
    ]
    if barred:
        cells.insert(1, f"<th {look['head']}></th>")
    return f"<thead><tr {look['row']}>{''.join(cells)}</tr></thead>"


def _row(row: Row, columns: Sequence[Column], look: Look, barred: bool) -> str:
    cells = []
    for i, (cell, column) in enumerate(zip(row.cells, columns, strict=True)):
        kind = _kind(i, cell, column)
        hint = f' title="{safe(row.full)}"' if i == 0 and row.full and row.full != cell else ""
        shown = wording.cut(cell, _LONGEST) if column.fit == "cut" else cell
        hint = hint or (f' title="{safe(cell)}"' if shown != cell else "")
        named = f' data-title="{safe(column.title)}"' if i and column.title else ""
        inside = _linked(shown, row, look) if i == len(columns) - 1 else _indented(shown)
        inside = f'<code style="{_SOURCE}">{inside}</code>' if column.fit == "code" else inside
        cells.append(f"<td {look[kind]}{hint}{named}>{inside}</td>")
    if barred:
        cells.insert(1, _bar(row, look))
    return f"<tr {look['row']}>{''.join(cells)}</tr>"


def _linked(cell: str, row: Row, look: Look) -> str:
    """A lesson is a link where its notebook is there: in a notebook's output, for a page may be read anywhere."""
    path = lesson_path(row.lesson) if row.lesson and look is _INLINE else None
    if path is None:
        return _indented(cell)
    return f'<a href="{safe(path)}" target="_blank" style="text-decoration:underline">{safe(cell)}</a>'


def _kind(place: int, cell: str, column: Column) -> str:
    if column.fit == "number":
        return "cell number"
    if place == 0:
        return "cell first"
    return "cell short" if len(cell) <= _SHORT else "cell"


def _bar(row: Row, look: Look) -> str:
    if row.bar is None:
        return f"<td {look['bar cell']}></td>"
    width = 100 * min(max(row.bar, 0), 1)
    if look is _PAGE:
        style = f"width:{width:.2f}%;background-color:{row.colour}"
    else:
        pixels = f"width:{max(width * _BAR_PX / 100, 2):.0f}px;height:12px;margin-top:3px;border-radius:2px"
        style = f"{pixels};background-color:{row.colour}"
    return f'<td {look["bar cell"]}><div {look["bar"]} style="{style}"></div></td>'


def _indented(cell: str) -> str:
    bare = cell.lstrip(" ")
    return "&nbsp;" * (len(cell) - len(bare)) + safe(bare)


def plain_table(titles: Sequence[str], rows: Iterable[Sequence[str]], numbers: Container[str], style: str = "") -> str:
    """A table for a notebook's output; the columns whose titles are among `numbers` are aligned on the right."""
    style = ";".join(filter(None, ("border-collapse:collapse", style)))
    head, body = _plain_row("th", titles, titles, numbers), "".join(_plain_row("td", titles, r, numbers) for r in rows)
    return f'<table style="{style}"><thead>{head}</thead><tbody>{body}</tbody></table>'


def _plain_row(tag: str, titles: Sequence[str], cells: Sequence[str], numbers: Container[str]) -> str:
    align = ["right" if title in numbers else "left" for title in titles]
    style = "padding:2px 8px;white-space:nowrap"
    pairs = zip(align, cells, strict=True)
    row = "".join(f'<{tag} style="text-align:{side};{style}">{html.escape(cell)}</{tag}>' for side, cell in pairs)
    return f"<tr>{row}</tr>"
