"""The HTML picture of comparisons, climbs, headspace and predictions: what is drawn, and the words beside it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpulab.tuning.record import Comparison, Experiment
from gpulab.views.climb.attempts import ladder
from gpulab.views.climb.climb import Climbed
from gpulab.views.comparison import html_figure
from gpulab.views.comparison.comparison import Compared
from gpulab.views.comparison.html_figure import of_many, of_two
from gpulab.views.comparison.time_rows import segments, times_of_settings
from gpulab.views.html_rows import UNDECIDED, VERDICTS
from gpulab.views.predictions import Predicted
from tests.support import comparisons as made
from tests.support.markup import Markup
from tests.views.every_view import PREDICTIONS, a_climb


def test_bars_are_as_long_as_the_times() -> None:
    parts = [{"data_wait": 20.0, "compute": 20.0}, {"compute": 10.0}]
    of_a, of_b = (segments(one, 40.0) for one in parts)
    assert sum(s.share for s in of_a) == pytest.approx(1) and sum(s.share for s in of_b) == pytest.approx(0.25)
    assert [s.label for s in of_a] == ["waiting for the DataLoader", "computing"]


def test_times_are_those_of_the_blocks() -> None:
    comparison = made.a_comparison()
    words = Markup(of_two(comparison)).words
    assert "A: baseline" in words and "37.9 ms" in words and "13.0 ms" in words
    assert any("2.91× speedup (2.87–2.92): faster" in word for word in words)


def test_a_sweep_has_a_row_per_setting_on_one_axis() -> None:
    words = Markup(of_many(made.a_sweep())).words
    for setting in ("batch_size=64", "batch_size=128", "batch_size=256", "batch_size=4096"):
        assert words.count(setting) == 1
    assert words.count("1") == 1 and "Out of memory at 3.1 GiB." in words
    assert "900 MiB" in times_of_settings(made.a_sweep())


def wild(comparison: Comparison, **changes: object) -> Comparison:
    return replace(comparison, **changes)


def test_a_huge_noise_floor_stays_on_the_axis() -> None:
    shown = html_figure.factor_range(wild(made.a_comparison(), noise_floor=6.39, verdict="undecided"))
    assert min(shown.factors) == pytest.approx(1 / 7.39) and shown.colour == UNDECIDED
    assert not Markup(of_two(wild(made.a_comparison(), noise_floor=6.39))).caught


def test_colours_are_those_of_the_verdict() -> None:
    slower = made.a_comparison(made.faster(blocks=made.blocks(1, 76.0)))
    found = {c.verdict: html_figure.factor_range(c).colour for c in (made.a_comparison(), slower)}
    assert found == {verdict: VERDICTS[verdict] for verdict in ("faster", "slower")}


def test_a_climb_ends_in_all_that_was_kept() -> None:
    read = Markup(Climbed(a_climb())._picture())
    assert "All together: knob_1=on, knob_3=on" in read.words
    assert "37.9 → 13.0 ms a step · 2.91× speedup (2.87–2.92)" in read.words
    assert "not kept: undecided" in read.words and "reference" not in read.words
    assert not read.caught and "–" not in read.words


def test_bars_of_a_climb_begin_at_what_was_kept() -> None:
    assert [row.bar for row in ladder(a_climb()).rows] == [1.0, 0.0, 0.0, pytest.approx(0.5 * 0.8)]


def test_predictions_are_on_one_axis() -> None:
    words = Markup(Predicted("mine", PREDICTIONS)._picture()).words
    assert "no prediction" in words and "0.91× to 2.0× speedup" in words
    assert Predicted("mine", ()).headline.sentence == "No finding of this run names a setting, so nothing is predicted."


def test_an_undecided_sweep_says_how_to_decide_it() -> None:
    sides = [made.batch(64, 60.0, 11), made.batch(128, 100.0, 12)]
    compared = tuple(wild(made.a_comparison(side), verdict="undecided") for side in sides)
    sweep = Experiment((made.as_written(), *sides), compared, 20.0)
    for shown in (Compared(sweep).text(), Compared(sweep).fragment().partition("<details")[0]):
        assert "%%gpuprofile --ab batch_size=128 --budget 120" in " ".join(shown.split())
    assert "--budget 120" not in Compared(made.a_sweep()).text(full=True)


def test_a_setting_that_failed_is_not_among_the_cautions() -> None:
    failed = wild(made.a_comparison(made.out_of_memory()), evidence="sequential", differences=("It had no effect.",))
    sweep = Experiment((made.as_written(), made.faster(), failed.b), (made.a_comparison(), failed), 20.0)
    text = Compared(sweep).text(full=True)
    assert "BEFORE YOU RELY ON THIS" not in text and "out of memory at 3.1 GiB" in text
