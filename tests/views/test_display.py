"""Where a report is shown: as text in a terminal, as picture and tables in a notebook; what is told if a view fails."""

from __future__ import annotations

import IPython.display
import pytest

from gpulab.views import live_view
from gpulab.views.live_view import Stage
from gpulab.views.report.report import Report
from tests.support import synthetic

CASE = synthetic.cases()["tiny"]
REPORT = Report(CASE.facts, CASE.diagnosis)
Shown = list[dict[str, str]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """What a notebook displays, in order."""
    bundles: Shown = []
    monkeypatch.setattr(live_view, "in_notebook", lambda: True)
    monkeypatch.setattr(IPython.display, "display", lambda bundle, **_: bundles.append(bundle))
    return bundles


class Monitor:
    """A live view that has had a problem, or none."""

    def __init__(self, problem: str = "") -> None:
        self.problem = problem
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_a_terminal_gets_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    opened = Stage.open(live=True)
    opened.show(REPORT)
    assert opened.monitor is None
    assert capsys.readouterr().out == REPORT.text() + "\n"
    opened.say("Nothing to report.")
    assert capsys.readouterr().out == "Nothing to report.\n"


def test_a_notebook_gets_one_output_with_the_headline_once(shown: Shown) -> None:
    Stage.open(live=False).show(REPORT)
    [bundle] = shown
    assert set(bundle) == {"text/html", "text/plain"}
    assert bundle["text/plain"] == REPORT.text()
    assert bundle["text/html"] == REPORT.fragment()
    assert bundle["text/html"].count(CASE.headline.sentence) == 1


def test_where_all_is_asked_for_nothing_is_folded(shown: Shown) -> None:
    Stage.open(live=False, full=True).show(REPORT)
    [bundle] = shown
    assert bundle["text/plain"] == REPORT.text(full=True)
    folds = bundle["text/html"].count("<details") - bundle["text/html"].count("Why, and what to expect")
    assert bundle["text/html"].count(" open>") == folds > 3 and " open>" not in REPORT.fragment()


def test_a_report_or_a_sentence_takes_the_live_views_place(shown: Shown) -> None:
    monitor = Monitor()
    stage = Stage(monitor, notebook=True)  # type: ignore[arg-type]
    stage.show(REPORT)
    stage.say("Nothing to report.")
    assert monitor.closed and [set(bundle) for bundle in shown] == [{"text/html", "text/plain"}, {"text/plain"}]
    assert shown[1]["text/plain"] == "Nothing to report."


def test_a_live_view_that_could_not_be_is_told_but_not_recorded(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "the package <anywidget> is not installed"
    monkeypatch.setattr(live_view, "why_no_live_view", lambda: reason)
    Stage.open(live=False).show(REPORT)
    assert "anywidget" not in shown.pop()["text/html"], "it was not asked for"
    Stage.open(live=True).show(REPORT)
    assert "live view" in shown[0]["text/html"] and "the package &lt;anywidget&gt; is not" in shown[0]["text/html"]
    assert not REPORT.facts.run.missing


def test_a_live_view_that_ended_early_is_told(shown: Shown) -> None:
    Stage(Monitor("OSError: no socket"), notebook=True).show(REPORT)  # type: ignore[arg-type]
    assert ["OSError: no socket" in bundle["text/html"] for bundle in shown] == [True]
