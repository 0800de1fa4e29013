"""The first line of a report: how the run ended, what a setting brought, and no share of a handful of steps."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.analysis.facts import facts
from gpulab.analysis.steps import step_change
from gpulab.api.reading import report
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.headline import Headline, headline
from gpulab.run import Outcome, Run, Settings
from gpulab.tuning.record import Speed
from tests.support.rule_cases import run_of
from tests.support.synthetic import phases, steps


def of(run: Run) -> Headline:
    return headline(diagnose(facts(run), predict_cures=False))


def brief(count: int, counted: int, **changes: object) -> Run:
    """A run of so many steps, waiting for data for most of each; the profiler starts and stops beside the counted."""
    traced = count - counted - 3
    marks = phases(1, counted + 1, traced, 1)
    run = run_of(wait=0.9)
    run = replace(run, steps=steps(np.full(count, 20.0), np.full(count, 18.0), marks), loader=None, timeline=None)
    return replace(run, **changes)


@pytest.mark.parametrize(
    ("outcome", "asked", "said"),
    [
        ("stopped", 250, "Stopped early after 9 of 250 steps: little data."),
        ("stopped", None, "Stopped early after 9 steps: little data."),
        ("failed", None, "Ended by an exception after 9 steps: little data."),
        ("interrupted", None, "Interrupted after 9 steps: little data."),
        ("completed", None, ""),
        ("stopped", 9, ""),
    ],
)
def test_an_early_end_is_said_first(outcome: Outcome, asked: int | None, said: str) -> None:
    run = brief(9, 5, outcome=outcome, settings=Settings(steps=asked))
    assert of(run).sentence.startswith(said or "Likely cause: ")
    assert not said or of(replace(run, loader=run_of().loader)).sentence.partition(" after 9 ")[0] in said


def test_an_epoch_says_how_far_it_came() -> None:
    run = brief(9, 5, outcome="stopped")
    assert of(replace(run, loader=run_of(workers=0).loader)).sentence.startswith(
        "Stopped early after 9 of an epoch's 31 steps: little data."
    )


@pytest.mark.parametrize(("count", "counted", "shares"), [(9, 5, False), (12, 4, False), (12, 5, True), (40, 30, True)])
def test_few_steps_have_no_share_in_a_headline(count: int, counted: int, shares: bool) -> None:
    run = brief(count, counted)
    assert (facts(run).step_us.count if facts(run).step_us else 0) == counted  # type: ignore[union-attr]
    told = of(run)
    assert ("%" in told.sentence) is shares and "%" not in told.evidence
    assert (
        shares
        or told.sentence == f"Likely cause: waiting for data. {counted} counted steps are too few for percentages."
    )
    assert of(replace(run, source="trace")).sentence.count("%") == of(brief(40, 30)).sentence.count("%")


def test_a_setting_is_told_beside_the_code_as_written() -> None:
    written = replace(run_of(wait=0.9), id="a", code="train()")
    half = replace(written.steps, end_ns=written.steps.start_ns + written.steps.wall_ns // 2)
    workers = Settings(knobs={"workers": "2"})
    run = replace(written, id="b", steps=half, settings=workers)
    change = step_change(run, [written, run])
    assert change is not None and (change.now_us, change.before_us, change.unit) == (10_000, 20_000, "step")
    late = replace(half, start_ns=half.start_ns + 5 * 10**9, end_ns=half.end_ns + 5 * 10**9)
    later = step_change(replace(run, steps=late), [written])
    assert later is not None and later.setup_s == pytest.approx(5.0, abs=0.1) and step_change(run, [written]) == change
    double = replace(run, steps=replace(half, sample_count=2 * half.sample_count))
    per_sample = step_change(double, [written])
    assert per_sample is not None and (per_sample.unit, per_sample.now_us) == ("sample", 10_000 / 64)
    other = replace(written, code="train(2)")
    for run_, earlier in ((written, [run]), (run, [other]), (run, [replace(run, id="c")]), (run, [])):
        assert step_change(run_, earlier) is None


def test_the_report_says_it_where_this_process_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpulab.api import reading
    from gpulab.api.runs import Runs

    known = Runs()
    monkeypatch.setattr(reading, "runs", known)
    written = replace(run_of(wait=0.9), id="a", code="train()")
    known.add(written)
    run = replace(written, id="b", settings=Settings(knobs={"workers": "2"}))
    shown = report(run)
    said = "20.0 ms per step; baseline: 20.0 ms. Input-bound: 90 %"
    assert shown.headline.sentence.startswith(said) and said in " ".join(shown.text().split())
    assert str(shown.json()["headline"]["sentence"]).startswith(said)  # type: ignore[index]
    assert "baseline" not in report(written).headline.sentence
    monkeypatch.setitem(reading.speeds, "b", Speed("faster", 0.037, (0.034, 0.04), 0.01, 12))
    said = "Faster: speedup 27× (25–29) per step over the baseline, in 12 pairs of interleaved blocks. Input-bound"
    assert report(run).headline.sentence.startswith(said), "one figure for what a setting brings"
