"""Reports of real runs: a first screen is one screen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import pytest

import gpulab
from gpulab.run import Run
from gpulab.views.report.report import Report
from gpulab.views.text import FIRST_SCREEN
from gpulab.views.view import View
from gpulab.views.wording import plain
from tests.support import real_traces, synthetic
from tests.support.paths import ROOT

RUNS: dict[str, Callable[[], object]] = {
    **{name: partial(getattr, case, "run") for name, case in synthetic.cases().items()},
    **{p.name: partial(gpulab.load, p) for p in sorted((ROOT / "tests" / "recorded").glob("*.gz"))},
    **{name: lambda name=name: gpulab.load(real_traces.path(name)) for name in real_traces.SINGLE},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", RUNS)
def test_the_first_screen_is_one(name: str) -> None:
    report = gpulab.report(cast("Run", RUNS[name]()))
    assert isinstance(report, Report)
    _the_first_screen_is_one(report)


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
