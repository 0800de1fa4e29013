"""The book builds without a warning, has every lesson, and its own links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

from gpulab.lessons.catalogue import LESSONS
from tests.support.changes import where_changed
from tests.support.paths import ROOT

pytestmark = where_changed("docs/", "notebooks/", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("book")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-c", "docs/book", "-W", "--keep-going", "-q"]
    done = subprocess.run(
        [*command, "-d", str(folder / "trees"), ".", str(folder / "html")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "html"


def links_of(page: Path) -> tuple[list[str], set[str]]:
    """Where its links lead, and what can be linked in it."""
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r'<a\s[^>]*?\bhref="([^"]*)"', text)
    return [unescape(target) for target in targets], set(re.findall(r'\s(?:id|name)="([^"]+)"', text))


@pytest.mark.timeout(600)
def test_every_lesson_is_a_page_with_what_it_showed(book: Path) -> None:
    for entry in LESSONS:
        page = (book / "notebooks" / f"{entry.name}.html").read_text(encoding="utf-8")
        assert f"Lesson {entry.number}: " in page, "the output of its first cell"
        assert "&lt;Figure size" not in page, "a figure is shown as an image"


@pytest.mark.timeout(600)
def test_links_of_the_book_lead_somewhere(book: Path) -> None:
    pages = {path: links_of(path) for path in book.rglob("*.html")}
    broken = []
    for path, (targets, _) in pages.items():
        for target in targets:
            if re.match(r"[a-z]+:", target) or not target or target == "#":
                continue
            file, _, fragment = unquote(target).partition("#")
            there = (path.parent / file).resolve() if file else path.resolve()
            known = pages.get(there)
            if not there.exists() or (fragment and known is not None and fragment not in known[1]):
                broken.append((path.name, target))
    assert "\n".join(map(str, sorted(set(broken)))) == ""
