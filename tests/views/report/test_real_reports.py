"""Reports of real runs: a first screen is one screen, and the share of waiting is one number in every view."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import cast

import pytest

import gpulab
from gpulab.analysis.facts import Facts
from gpulab.formatting import percent
from gpulab.lessons.starving import waiting_share
from gpulab.run import Run
from gpulab.views.report.html_figure import picture
from gpulab.views.report.report import Report
from gpulab.views.report.sections import PROFILED_STEPS
from gpulab.views.text import FIRST_SCREEN
from gpulab.views.view import View
from gpulab.views.wording import PARTS, plain
from tests.support import real_traces, synthetic
from tests.support.paths import ROOT

WAITING = PARTS["data_wait"].label
OF_DATA = ("data_starved", "cpu_preprocessing", "storage_bound", "slow_collate")


RUNS: dict[str, Callable[[], object]] = {
    **{name: partial(getattr, case, "run") for name, case in synthetic.cases().items()},
    **{p.name: partial(gpulab.load, p) for p in sorted((ROOT / "tests" / "recorded").glob("*.gz"))},
    **{name: lambda name=name: gpulab.load(real_traces.path(name)) for name in real_traces.SINGLE},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", RUNS)
def test_one_screen_and_one_share_of_waiting(name: str) -> None:
    report = gpulab.report(cast("Run", RUNS[name]()))
    assert isinstance(report, Report)
    _the_first_screen_is_one(report)
    facts = report.facts
    document = report.json()
    assert document["data_wait_fraction"] == facts.data_wait_fraction == waiting_share(facts.run)
    if report.diagnosis.first.key in OF_DATA and facts.data_wait_fraction is not None:
        assert re.findall(r"[<>]? ?[\d.]+ %", report.headline.sentence)[0].strip() == percent(facts.data_wait_fraction)
    _the_table_agrees_or_says_why_not(report, facts)
    _the_picture_agrees_or_says_why_not(facts)


def test_the_first_screen_of_eight_ranks_is_one() -> None:
    _the_first_screen_is_one(gpulab.report(gpulab.load(real_traces.path(real_traces.RANKS[0]).parent)))


def _the_first_screen_is_one(view: View) -> None:
    for width in (60, 80, 100):
        first = view.text(width)
        assert len(first.splitlines()) <= FIRST_SCREEN
        assert max(map(len, first.splitlines())) <= width or "KEEP IT" in first
        for words in (view.headline.sentence, view.headline.evidence):
            assert "".join(plain(words).split()) in "".join(first.split()), "the headline is whole"
    assert len(view.text(full=True)) >= len(first)


def _the_table_agrees_or_says_why_not(report: Report, facts: Facts) -> None:
    table = next((s for s in report._sections() if s.title.startswith("Where the") and s.rows), None)
    row = next((r for r in table.rows if r.cells[0] == WAITING), None) if table else None
    if table is None or row is None or facts.data_wait_fraction is None:
        return
    same = row.cells[1] == percent(facts.data_wait_fraction)
    assert same or (table.columns[1].title == PROFILED_STEPS and PROFILED_STEPS in table.result)


def _the_picture_agrees_or_says_why_not(facts: Facts) -> None:
    drawn = picture(facts)
    told = re.search(rf"{WAITING} <b>([^<]*)</b>", drawn)
    if told is None or facts.data_wait_fraction is None:
        return
    share = told[1].replace("&lt;", "<").replace("&gt;", ">")
    assert share == percent(facts.data_wait_fraction) or share.endswith("(GPU idle)") or f"({PROFILED_STEPS})" in drawn
