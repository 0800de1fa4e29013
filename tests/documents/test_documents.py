"""What the documents say of the code, held against the code: cited headings, links, figures of the hardware table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import first_runs
from benchmarks.harness import RESULTS
from gpulab.analysis.gpu.device_peaks import Peaks, peaks_of
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
CITABLE = ("definitions.md", "pitfalls.md")
CODE = sorted(
    path
    for folder in ("gpulab", "benchmarks", "planted")
    for path in (ROOT / folder).rglob("*.py")
    if "results" not in path.parts
)
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "notebooks" / "README.md",
    *sorted(DOCS.glob("*.md")),
]

_MENTION = re.compile(r"\b(definitions|pitfalls)\.md\b")
_CITATION = re.compile(r'\b(?P<page>definitions|pitfalls)\.md,\s+(?:#\s+)?"(?P<heading>[^"]+)"')
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


def headings(page: Path) -> list[str]:
    return _HEADING.findall(_FENCED.sub("", page.read_text(encoding="utf-8")))


def anchor(heading: str) -> str:
    """The fragment by which GitHub links a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_citations(text: str) -> Iterator[str]:
    """Mentions of a citable page that name no heading of that page."""
    cited = {match.start(): match for match in _CITATION.finditer(text)}
    for mention in _MENTION.finditer(text):
        citation = cited.get(mention.start())
        if citation is None:
            yield f"{mention[0]} without a heading in quotes"
        elif citation["heading"] not in headings(DOCS / f"{citation['page']}.md"):
            yield f"{mention[0]} has no heading {citation['heading']!r}"


def broken_links(page: Path) -> Iterator[str]:
    """Relative links of a page whose file, or whose heading in a Markdown file, is not there."""
    for link in _LINK.finditer(_FENCED.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link["target"]:
            continue
        path, _, fragment = link["target"].partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (fragment and fragment not in {anchor(heading) for heading in headings(target)}):
            yield link["target"]


def test_citations_in_code_name_a_heading_that_exists() -> None:
    broken = {str(path.relative_to(ROOT)): [*broken_citations(path.read_text(encoding="utf-8"))] for path in CODE}
    assert {path: words for path, words in broken.items() if words} == {}


def test_a_citation_without_its_heading_is_noticed() -> None:
    assert [*broken_citations('see definitions.md, "Feeding" and\npitfalls.md,\n# "NVML"')] == []
    assert len([*broken_citations("see definitions.md")]) == 1
    assert len([*broken_citations('see definitions.md, "Nowhere"')]) == 1


@pytest.mark.parametrize("page", CITABLE)
def test_pages_that_code_cites_are_cited(page: str) -> None:
    assert any(page in path.read_text(encoding="utf-8") for path in CODE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_resolve(page: Path) -> None:
    assert [*broken_links(page)] == []


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# One\n## Two (and more)\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md) [b](there.md#two-and-more) [c](https://x.y/z)\n```\n[d](in_code.md)\n```\n")
    assert [*broken_links(page)] == []
    page.write_text("[a](missing.md) [b](there.md#three)")
    assert [*broken_links(page)] == ["missing.md", "there.md#three"]


def test_the_hardware_table_is_the_one_that_the_code_uses() -> None:
    text = (DOCS / "definitions.md").read_text(encoding="utf-8").partition("## Hardware table")[2]
    rows = re.findall(r"^\| (.+) \|$", text.partition("\n## ")[0], flags=re.MULTILINE)[2:]
    cells = [row.split(" | ") for row in rows]
    figures: dict[str, list[Any]] = {
        name: [None if value == "–" else float(value) for value in values] for name, *values in cells
    }
    shown = {name: Peaks(*values) for name, values in figures.items()}
    assert len(shown) == 16
    assert {name: peaks_of(name) for name in shown} == shown


def test_contributing_names_every_folder_of_the_package() -> None:
    table = (
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Find your way")[2].partition("\n## ")[0]
    )
    named = set(re.findall(r"`(\w+)/`", table)) - {"gpulab"}
    assert named == {path.parent.name for path in (ROOT / "gpulab").glob("*/__init__.py")}


def test_the_list_of_documents_is_complete() -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md") if path.name != "README.md")


def test_the_front_door_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_first_runs_are_summed_up_as_they_were_measured() -> None:
    """The headline of docs/accuracy.md, from what the benchmark keeps."""
    sums = first_runs.summed(first_runs.kept())
    with_cause, right, healthy, alarms = (sums[k] for k in ("with_cause", "right", "healthy", "false_alarms"))
    text = " ".join((DOCS / "accuracy.md").read_text(encoding="utf-8").split())
    headline = f"{right} of {with_cause} headlines were right ({100 * right / with_cause:.0f} %)"
    assert headline in text
    assert headline in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"false alarms on healthy cells: {alarms} of {healthy}" in text


@pytest.mark.parametrize(("part", "cells"), [("aside", "kept aside"), ("tuned", "used to build the rules")])
def test_later_runs_are_summed_up_as_they_were_measured(part: str, cells: str) -> None:
    totals = json.loads((RESULTS / f"planted_{part}.json").read_text(encoding="utf-8"))["totals"]
    right, with_cause = totals["headline_right"], totals["sick"]
    alarms, healthy = totals["false_alarms"], totals["healthy"]
    error, held = f"{totals['median_error']:.0%}", "{} of {}".format(*totals["interval_holds"])
    text = (DOCS / "accuracy.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| {cells}.* \| {right} of {with_cause} \| {alarms} of {healthy} \|$", text, re.MULTILINE)
    assert re.search(rf"^\| {cells}.* \| {error.replace('%', ' %')} \| {held} \|$", text, re.MULTILINE)


def test_errors_of_first_predictions_are_the_measured_ones() -> None:
    runs = [entry["first_run"] for entry in first_runs.kept() if entry["first_run"]]
    errors = [f"{100 * run['median_error']:.0f}" for run in runs if run["median_error"] is not None]
    shown = re.search(r"at their first run \| ([\d %,]+) \|", (DOCS / "accuracy.md").read_text(encoding="utf-8"))
    assert shown is not None
    assert re.findall(r"\d+", shown[1]) == errors
