"""The first screen of every result: 25 lines in a terminal, and of all that is below it one line each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

import gpulab
from gpulab.diagnosis.headline import Headline
from gpulab.run import Pause, PauseSum
from gpulab.views.layout import Section
from gpulab.views.report.report import Report
from gpulab.views.text import FIRST_SCREEN, first_screen
from gpulab.views.view import View
from gpulab.views.wording import plain
from tests.support import real_traces, synthetic
from tests.support.paths import ROOT

CASES = synthetic.cases()
RECORDED = sorted((ROOT / "tests" / "recorded").glob("*.gz"))
MS = 1_000_000


def _loaded(find: Callable[[], Path]) -> View:
    return gpulab.report(gpulab.load(find()))


MADE: dict[str, Callable[[], View]] = {
    **{path.name: partial(_loaded, path.absolute) for path in RECORDED},
    **{name: partial(_loaded, partial(real_traces.path, name)) for name in real_traces.SINGLE},
    "eight ranks": partial(_loaded, lambda: real_traces.path(real_traces.RANKS[0]).parent),
}


@pytest.mark.parametrize("name", MADE)
def test_a_text_has_at_most_25_lines(name: str) -> None:
    view = MADE[name]()
    for width in (60, 80, 100):
        first = view.text(width)
        assert len(first.splitlines()) <= FIRST_SCREEN, name
        assert max(map(len, first.splitlines())) <= width or "KEEP IT" in first
        for words in (view.headline.sentence, view.headline.evidence):
            assert "".join(plain(words).split()) in "".join(first.split()), "the headline is whole"
    assert len(view.text(full=True)) >= len(first)


def test_pauses_of_milliseconds_are_not_told() -> None:
    case = CASES["cpu"]
    for longest_ms, told in ((3, False), (300, True)):
        pauses = (Pause("gc", 100 * MS, (100 + longest_ms) * MS),)
        run = replace(case.run, pauses=pauses, more_pauses=(PauseSum("gc", 3, 900_000),))
        shown = Report(replace(case.facts, run=run), case.diagnosis)
        assert ("collecting garbage" in shown.text(full=True)) == told


def test_an_edit_without_room_is_its_added_lines() -> None:
    """A climb's ladder may fill the screen: what to write still stands on it."""
    code = "--- a\n+++ b\n@@ -1 +1 @@\n-loader = DataLoader(data)\n+loader = DataLoader(data, num_workers=2)"
    code += "\n " * 30
    edit = Section("Keep it", code=code, lines=("This edit makes it permanent:",))
    shown = first_screen("a", Headline("k", "It is faster.", "Measured.", "good"), (edit,), "The rest: …")
    assert "  Keep it: +loader = DataLoader(data, num_workers=2)" in shown.splitlines()
