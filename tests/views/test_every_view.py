"""What holds for every result that can be shown: golden words, escaped, self-contained, within its width and screen."""

from __future__ import annotations

import functools
import json
import re

import pytest

from gpulab.views.page import script_policy
from gpulab.views.text import FIRST_SCREEN
from gpulab.views.wording import plain
from tests.support import golden_text
from tests.support.markup import Markup, controls
from tests.support.synthetic import HOSTILE
from tests.views.every_view import every_view

VIEWS = every_view()
EVERY = pytest.mark.parametrize("name", VIEWS)
NOTEBOOK_TAGS = {
    "div",
    "span",
    "table",
    "thead",
    "tbody",
    "tfoot",
    "tr",
    "th",
    "td",
    "p",
    "b",
    "a",
    "details",
    "summary",
    "pre",
}
NOTEBOOK_ATTRIBUTES = {"style", "title", "class", "data-title", "href", "target", "scope"}
WIDE = ("climb", "climb_hostile", "comparison_none", "comparison_sequential")  # their tables need up to 71 columns
ATTRIBUTES = NOTEBOOK_ATTRIBUTES | {
    "charset", "name", "content", "http-equiv", "lang", "viewbox", "preserveaspectratio", "fill", "stroke",
    "stroke-width", "vector-effect", "d", "open",
}  # fmt: skip


@functools.cache
def fragment_of(name: str) -> str:
    return VIEWS[name].fragment()


@functools.cache
def page_of(name: str) -> str:
    """The page without its timeline, which test_timeline_page.py reads."""
    page = re.sub(r'<section class="gpulab-timeline">.*?</section>', "", VIEWS[name].html(), flags=re.DOTALL)
    return page.replace(f"; script-src {script_policy()}", "")


@EVERY
def test_it_says_word_for_word(name: str) -> None:
    golden_text.check(name, f"{VIEWS[name].text()}\n\n{'=' * 100}\n\n{VIEWS[name].text(full=True)}\n")


@EVERY
def test_a_text_keeps_to_its_width_and_a_screen_to_25_lines(name: str) -> None:
    view = VIEWS[name]
    for width in (77, 100) if name in WIDE else (60, 77, 100):
        first, whole = view.text(width), view.text(width, full=True)
        assert len(first.splitlines()) <= FIRST_SCREEN
        for text in (first, whole):
            assert max(map(len, text.split("KEEP IT")[0].splitlines())) <= width and not controls(text)
            for words in (view.headline.sentence, view.headline.evidence) if "hostile" not in name else ():
                assert "".join(plain(words).split()) in "".join(text.split()), "the headline is whole"


@EVERY
def test_a_page_stands_alone_and_nothing_in_it_acts(name: str) -> None:
    page = page_of(name)
    for markup in (page, fragment_of(name)):
        read = Markup(markup)
        assert not read.open and not controls(markup)
        assert {"script", "img", "link", "iframe", "object"}.isdisjoint(read.tags)
        assert {attribute for attribute, _ in read.attributes} <= ATTRIBUTES
        assert "hostile" not in name or plain(HOSTILE) in read.text
    assert "Content-Security-Policy" in page and not re.search(r'(src|href)="(?!https://github)', page)


@EVERY
def test_a_notebook_keeps_every_tag_of_a_fragment(name: str) -> None:
    read = Markup(fragment_of(name))
    assert set(read.tags) - NOTEBOOK_TAGS <= {"style", "svg", "path"}, "it is whole without these"
    text = re.sub(r"<(svg|style).*?</\1>", "", fragment_of(name), flags=re.DOTALL)
    assert {attribute for attribute, _ in Markup(text).attributes} <= NOTEBOOK_ATTRIBUTES
    fixed = [v for n, v in read.attributes if n == "style" and v and re.search(r"(?<!-)color:(?!transparent)", v)]
    assert not fixed, "a fixed text colour cannot be read in both themes"
    assert VIEWS[name].bundle() == {"text/html": fragment_of(name), "text/plain": VIEWS[name].text()}


@EVERY
def test_a_picture_has_no_ground_no_ink_and_no_word_cut_off(name: str) -> None:
    picture = VIEWS[name]._picture()
    assert not re.search(r"(?<![-\w])color:", picture) and not Markup(picture).caught
    for forbidden in ("#fff", "white;", "font-family", "<img", "data:image"):
        assert forbidden not in picture.lower()


@EVERY
def test_what_the_picture_shows_is_not_shown_twice(name: str) -> None:
    """Its table is folded where the picture stands; in a text it leads."""
    view = VIEWS[name]
    before, _, after = fragment_of(name).partition("<details")
    for section in (section for section in view._sections() if section.pictured and view._picture()):
        assert section.title not in before and section.title in after
        assert section.title.upper() in view.text()


@EVERY
def test_page_and_fragment_say_what_the_text_says(name: str) -> None:
    """A name too long for its column is cut, and whole in its cell's hint."""
    for markup in (page_of(name), fragment_of(name)):
        read = Markup(markup)
        seen = "".join(read.text.split())
        hints = {value for attribute, value in read.attributes if attribute == "title"}
        for section in VIEWS[name]._sections():
            if section.text_only:
                assert "".join(section.title.split()) not in seen
                continue
            for text in (section.title, *section.lines):
                assert "".join(text.split()) in seen
            for row in section.rows:
                assert all("".join(c.split()) in seen or (row.full or c) in hints for c in row.cells)


@EVERY
def test_every_folded_section_has_its_line(name: str) -> None:
    """Or it is about the measurement itself, or 25 lines have no room for it; the lines end in how to see the rest."""
    view = VIEWS[name]
    first = view.text().splitlines()
    assert "The rest: " in " ".join(first[-5:])
    folded = [section for section in view._sections() if not (section.lead or section.aside or section.code)]
    lines = [next((x for x in first if x.startswith(f"  {section.title}:")), "") for section in folded]
    assert all(lines) or len(first) >= FIRST_SCREEN - 1
    assert all(line.partition(": ")[2].strip() for line in lines if line) or name == "comparison_none"


@EVERY
def test_its_figures_are_plain_json(name: str) -> None:
    json_of = getattr(VIEWS[name], "json", None)
    if json_of is not None:
        data = json_of()
        assert json.loads(json.dumps(data, allow_nan=False)) == data
        assert not controls(json.dumps(data))
