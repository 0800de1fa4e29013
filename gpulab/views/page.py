"""HTML pages and notebook outputs from templates, which escape every text and need no network."""

from __future__ import annotations

import base64
from collections.abc import Container, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from gpulab.diagnosis.headline import Headline
from gpulab.formatting import capitalized, duration, gib, percent, plural
from gpulab.user_code import PACKAGE_FOLDER
from gpulab.views.layout import Section
from gpulab.views.wording import cut, lesson_path, plain

if TYPE_CHECKING:
    from jinja2 import Environment

_FOLDER = PACKAGE_FOLDER / "views"
NOTHING = Markup()


@cache
def static(name: str) -> Markup:
    """A style sheet or a script of `views/static`, unchanged."""
    return Markup((_FOLDER / "static" / name).read_text(encoding="utf-8"))


@cache
def _environment() -> Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        auto_reload=False,
        finalize=_printable,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(capitalized=capitalized, duration=duration, gib=gib, percent=percent, plural=plural)
    environment.filters.update(cut=cut, indented=_indented, lesson_path=lesson_path)
    environment.globals.update(static=static)
    return environment


def _printable(value: object) -> object:
    """A value as a template writes it: text without control characters, markup unchanged."""
    return plain(value) if type(value) is str else value


def _indented(text: str) -> Markup:
    """The text with leading spaces that HTML keeps."""
    bare = text.lstrip(" ")
    return Markup("&nbsp;") * (len(text) - len(bare)) + Markup.escape(plain(bare))


def render(template: str, **values: object) -> Markup:
    """A template of `views/templates` with these values; every text is escaped and stripped of control characters."""
    return Markup(_environment().get_template(template).render(values))


@cache
def macros(template: str) -> Any:
    """The macros of a template, as functions that return markup."""
    return _environment().get_template(template).module


def page(
    opening: str, headline: Headline, sections: Sequence[Section], picture: Markup, timeline: Markup = NOTHING
) -> str:
    """A self-contained page: no requests, picture included, light and dark; its only script is that of `timeline`.

    Headline, picture and leading sections come first; every other section is folded, with its result next to its title.
    """
    groups = _groups(sections, picture)
    groups["opened"].sort(key=lambda section: not section.lead)
    values = {"opening": opening, "headline": headline, "picture": picture, "timeline": timeline}
    return str(render("page.html", script_policy=script_policy, **values, **groups))


def fragment(headline: Headline, sections: Sequence[Section], picture: Markup = NOTHING, *, full: bool = False) -> str:
    """The first screen for a notebook's output, with all else folded below it; if `full`, nothing is folded.

    Only inline styles and no text colour, because notebooks keep these in untrusted outputs and they suit any theme.
    The only style sheet is for narrow places.
    """
    groups = _groups(sections, picture)
    return str(render("fragment.html", headline=headline, picture=picture, full=full, **groups))


def script_policy() -> str:
    """The source expression with which a Content-Security-Policy allows only the timeline's script."""
    import hashlib  # loads OpenSSL

    return f"'sha256-{base64.b64encode(hashlib.sha256(static('timeline.js').encode()).digest()).decode('ascii')}'"


def _groups(sections: Sequence[Section], picture: Markup) -> dict[str, list[Section]]:
    """The sections of the first screen, the folded sections, and the sections about the measurement."""
    groups: dict[str, list[Section]] = {"opened": [], "folded": [], "asides": []}
    for section in sections:
        if section.text_only:
            continue
        is_open = bool(section.code) or (section.lead and not (section.pictured and picture))
        groups["opened" if is_open else "asides" if section.aside else "folded"].append(section)
    return groups


def fragment_section(section: Section) -> Markup:
    """One section with inline styles only."""
    titled: Markup = macros("section.html").titled(section)
    return titled


def plain_table(titles: Sequence[str], rows: Iterable[Sequence[str]], numbers: Container[str]) -> str:
    """A table for a notebook's output; the columns whose titles are among `numbers` are aligned on the right."""
    return str(render("table.html", titles=titles, rows=rows, numbers=numbers))
