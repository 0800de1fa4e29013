"""The HTML picture of comparisons, climbs, headspace and predictions: what is drawn, and the words beside it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpulab.tuning.compare.blocks import compare_blocks
from gpulab.tuning.record import Comparison, Experiment
from gpulab.views.climb.climb import Climbed, of_ladder
from gpulab.views.comparison import html_figure
from gpulab.views.comparison.comparison import Compared
from gpulab.views.comparison.html_figure import of_many, of_two
from gpulab.views.comparison.time_rows import segments, times_of_settings
from gpulab.views.html_rows import UNDECIDED, VERDICTS
from gpulab.views.layout import Column, Row, Section, numbers
from gpulab.views.predictions import Predicted
from gpulab.views.view import View
from tests.support import comparisons as made
from tests.support.markup import Markup
from tests.views.every_view import PREDICTIONS


def test_bars_are_as_long_as_the_times() -> None:
    parts = [{"data_wait": 20.0, "compute": 20.0}, {"compute": 10.0}]
    of_a, of_b = (segments(one, 40.0) for one in parts)
    assert sum(s.share for s in of_a) == pytest.approx(1) and sum(s.share for s in of_b) == pytest.approx(0.25)
    assert [s.label for s in of_a] == ["waiting for the DataLoader", "computing"]


def test_times_are_those_of_the_blocks() -> None:
    comparison = made.a_comparison()
    words = Markup(of_two(comparison)).words
    assert "A: the cell as written" in words and "37.9 ms" in words and "13.0 ms" in words
    assert any("2.91 times as fast (2.87–2.92): faster" in word for word in words)


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
    slower = compare_blocks(made.as_written(), made.faster(blocks=made.blocks(1, 76.0)), restored=made.restored())
    found = {c.verdict: html_figure.factor_range(c).colour for c in (made.a_comparison(), slower)}
    assert found == {verdict: VERDICTS[verdict] for verdict in ("faster", "slower")}


def test_a_ladder_is_drawn_with_its_words_below() -> None:
    columns = (Column("setting"), *numbers("a step", "busy", "times as fast"), Column("", "wrap"))
    rows = (
        Row(("as written", "17.1 ms", "40 %", "–", "the reference"), 1.0),
        Row(("+ workers=2", "17.1 → 9.0 ms", "80 %", "1.9", "kept: faster"), 0.5),
        Row(("+ amp=bf16", "–", "–", "–", "not kept: out of memory"), 0.0),
    )
    read = Markup(of_ladder(Section("The ladder", columns, rows), [True, False]))
    assert "17.1 → 9.0 ms · 1.9 times as fast" in read.words and "not kept: out of memory" in read.words
    assert not read.caught and "the reference" not in read.words
    assert Climbed._picture is not View._picture


def test_predictions_are_on_one_axis_and_say_how_to_measure() -> None:
    view = Predicted("mine", PREDICTIONS)
    assert (
        view.headline.sentence == "Predicted, not measured: with workers=2 the cell is 2.5 times as fast (2.0 to 3.3)."
    )
    assert "%%gpuprofile --ab workers=2" in view.headline.evidence
    words = Markup(view._picture()).words
    assert "no prediction" in words and "0.91 to 2.0 times as fast" in words
    assert Predicted("mine", ()).headline.sentence == "No finding of this run names a knob, so nothing is predicted."


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
