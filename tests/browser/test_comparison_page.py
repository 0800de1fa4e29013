"""Comparisons as pages and as a notebook's output, drawn by a browser: nothing is wider than its place."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser

from tests.views.every_view import every_view

NAMES = (
    "comparison_faster", "comparison_predicted", "comparison_alike", "comparison_sweep", "headspace", "predictions",
    "predictions_refused",
)  # fmt: skip

pytestmark = pytest.mark.browser

TOO_WIDE = """
() => [...document.querySelectorAll("body *")].filter((e) => e.getClientRects().length && (
  e.getBoundingClientRect().right > innerWidth + 1 ||
  (e.innerText && e.clientWidth && e.scrollWidth > e.clientWidth + 1)
)).map((e) => e.tagName + ": " + e.textContent.slice(0, 60))
"""
OPEN = "() => document.querySelectorAll('details').forEach((d) => { d.open = true; })"
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


@pytest.mark.parametrize("width", [420, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wider_than_its_place(name: str, width: int, chromium: Browser, shots: Path) -> None:
    view = every_view()[name]
    for scheme in SCHEMES:
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        output = f"<body style='margin:8px;font:14px sans-serif;color-scheme:light dark'>{view.fragment()}</body>"
        for kind, markup in (("page", view.html()), ("output", f"<!doctype html>{output}")):
            page.set_content(markup)
            page.screenshot(path=shots / f"{kind}-{name}-{width}-{scheme}.png", full_page=True)
            page.evaluate(OPEN)
            assert page.evaluate(TOO_WIDE) == [], kind
        page.close()
