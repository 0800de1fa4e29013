"""Comparisons as pages and as a notebook's output, drawn by a browser: nothing is wider than its place."""

from __future__ import annotations

import itertools
import os
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
WIDTHS = (420, 1000)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def test_nothing_is_wider_than_its_place(chromium: Browser, shots: Path) -> None:
    page = chromium.new_page()
    too_wide = {}
    views = every_view()
    for name in NAMES:
        view = views[name]
        output = f"<body style='margin:8px;font:14px sans-serif;color-scheme:light dark'>{view.fragment()}</body>"
        for kind, markup in (("page", view.html()), ("output", f"<!doctype html>{output}")):
            page.set_content(markup)
            page.evaluate(OPEN)
            for width, scheme in itertools.product(WIDTHS, SCHEMES):
                page.set_viewport_size({"width": width, "height": 900})
                page.emulate_media(color_scheme=scheme)
                if "GPULAB_SHOTS" in os.environ:
                    page.screenshot(path=shots / f"{kind}-{name}-{width}-{scheme}.png", full_page=True)
                too_wide[f"{kind} of {name}, {width} px, {scheme}"] = page.evaluate(TOO_WIDE)
    page.close()
    assert {place: wide for place, wide in too_wide.items() if wide} == {}
    assert len(too_wide) == 8 * len(NAMES)
