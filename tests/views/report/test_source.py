"""The source beside its cost: the user's own lines, as they are, with the share where it was measured."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpulab.analysis.source_lines import SourceLine
from gpulab.diagnosis.finding import Diagnosis, Finding
from gpulab.diagnosis.headline import Headline
from gpulab.views import text
from gpulab.views.layout import PAIRS, Row, Section
from gpulab.views.page import fragment
from gpulab.views.report.findings import finding_sections, source_section

LINES = (
    SourceLine(10, "for letter in text:", 0.023),
    SourceLine(11, "    ids.append(table[letter] <b>)", 0.75),
    SourceLine(12, "return ids", None),
)


def finding(*source: SourceLine) -> Finding:
    return Finding("cpu_preprocessing", "It waits.", (), None, "likely", parts=("data_wait",), source=source)


def shown(*source: SourceLine, number: int = 1) -> Section:
    section = source_section(number, finding(*source))
    assert section is not None
    return section


def test_each_line_has_its_share_and_its_indent() -> None:
    assert [row.cells for row in shown(*LINES).rows] == [
        ("10", "2.3 %", "for letter in text:"),
        ("11", "75 %", "    ids.append(table[letter] <b>)"),
        ("12", "", "return ids"),
    ]


def test_only_the_first_findings_source_stands_open() -> None:
    second = shown(*LINES, number=2)
    assert shown(*LINES).lead and not second.lead and "finding 2" in second.title
    assert source_section(1, finding()) is None
    assert second.result == "line 11, 75 %: ids.append(table[letter] <b>)"


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ("9 % computing, 60 % waiting for the DataLoader, 25 % x", "9 % computing, 60 % waiting for the …"),
        ("9 % computing, 60 % waiting for data, 1.8 % of unknown", "9 % computing, 60 % waiting for data …"),
        ("5 % in sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32", "5 % in sm90_xmma_fprop_implicit_gemm_bf16bf16_…"),
        ("9 % computing", "9 % computing"),
    ],
)
def test_one_line_of_a_section_ends_with_a_word(result: str, shown: str) -> None:
    rows = (Row(("cure", f"{'Load ' * 30}it. More.")), Row(("try", "A. Then B.")))
    sections = (Section("1. Slow", PAIRS, rows, lead=True), Section("Step time", result=result))
    screen = text.first_screen("k", Headline("k", "It waits.", "", "bad"), sections, "M", 60)
    assert f"  Step time: {shown}" in screen.splitlines()
    assert screen.count("Load") == 30 and "it." in screen and "More" not in screen and "A. Then B." in screen


def test_a_terminal_shows_the_hottest_lines_and_what_follows() -> None:
    section = shown(*LINES, SourceLine(13, "", None), SourceLine(14, "x = 1", 0.2))
    rest = Section("Step time", result="1 ms")
    screen = text.first_screen("a run", Headline("a run", "It waits.", "", "bad"), (section, rest), "The rest: --all")
    assert [word in screen for word in ("letter in", "append", "return", "x = 1")] == [True, True, False, True]
    assert "Step time: 1 ms" in screen


def test_source_reaches_a_page_escaped_with_its_indent() -> None:
    page = fragment(Headline("a run", "It waits.", "", "bad"), (shown(*LINES),))
    assert "&nbsp;&nbsp;&nbsp;&nbsp;ids.append(table[letter] &lt;b&gt;)" in page and "<b>)" not in page


@pytest.mark.parametrize(
    ("source", "ranks", "words"),
    [
        ("cell", None, "on your cell, without an edit: %%gpuprofile --ab workers=2"),
        ("cell", 2, "on your cell, without an edit: %%gpuprofile --ab workers=2 --ranks 2"),
        ("block", None, "with this code in a cell of a notebook, without an edit: %%gpuprofile --ab workers=2"),
        ("script", None, "on your script, without an edit: gpulab record --ab workers=2 SCRIPT"),
        ("script", 2, "on your script, without an edit: gpulab record --ranks 2 --set workers=2 SCRIPT"),
        ("trace", None, "on your script, without an edit: gpulab record --ab workers=2 SCRIPT"),
    ],
)
def test_a_knob_is_offered_where_it_can_be_turned(source: str, ranks: int | None, words: str) -> None:
    diagnosis = Diagnosis((replace(finding(), settings=(("workers", "2"),)),))
    section = finding_sections(diagnosis, below_headline=True, source=source, ranks=ranks)[0]
    assert [row.cells[1] for row in section.rows if row.cells[0] == "try it"] == [words]


def test_an_edit_without_room_is_its_added_lines() -> None:
    """A climb's ladder may fill the screen: what to write still stands on it."""
    code = "--- a\n+++ b\n@@ -1 +1 @@\n-loader = DataLoader(data)\n+loader = DataLoader(data, num_workers=2)"
    edit = Section("Keep it", code=code + "\n " * 30, lines=("This edit makes it permanent:",))
    screen = text.first_screen("a", Headline("k", "It is faster.", "Measured.", "good"), (edit,), "The rest: …")
    assert "  Keep it: +loader = DataLoader(data, num_workers=2)" in screen.splitlines()
