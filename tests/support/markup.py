"""A page as a browser sees it: tags, attributes, text, and the words in boxes that could cut them off."""

from __future__ import annotations

import re
import unicodedata
from html.parser import HTMLParser

# Without a closing tag.
_EMPTY = ("meta", "img", "br", "input")


class Markup(HTMLParser):
    """Of the words, `caught` stand in an element whose height is fixed, or which cuts off what is too long."""

    def __init__(self, markup: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[tuple[str, bool]] = []
        self.text = ""
        self.words: list[str] = []
        self.caught: list[str] = []
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _EMPTY:
            style = dict(attrs).get("style") or ""
            tight = re.search(r"(?<![-\w])height:\d|overflow(-x)?:(hidden|auto|scroll)|text-overflow|position:", style)
            self.open.append((tag, bool(tight)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] in ("style", "script"):
            return
        self.text += data
        if data.strip():
            self.words.append(data)
            if any(tight for _, tight in self.open):
                self.caught.append(data)


def controls(text: str) -> set[str]:
    """Characters that a terminal would obey, or that turn the direction of a text."""
    return {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co")}
