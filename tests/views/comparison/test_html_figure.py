"""The HTML picture of comparisons, climbs, headspace and predictions: no white ground, no ink, no word cut off."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from gpulab.prediction.prediction import Prediction
from gpulab.tuning.compare.blocks import compare_blocks
from gpulab.tuning.headspace.headspace import Headspace
from gpulab.tuning.record import Comparison, Experiment
from gpulab.views.climb.climb import Climbed
from gpulab.views.climb.html_figure import of_ladder
from gpulab.views.comparison import html_figure
from gpulab.views.comparison.comparison import Compared
from gpulab.views.comparison.html_figure import of_many, of_two
from gpulab.views.comparison.time_rows import segments, times_of_settings
from gpulab.views.headspace import HeadspaceReport
from gpulab.views.html_rows import UNDECIDED, VERDICTS
from gpulab.views.layout import Column, Row, Section, numbers
from gpulab.views.predictions import Predicted
from gpulab.views.view import View
from tests.support import comparisons as made
from tests.views.test_html_rows import WordsInBoxes

PREDICTIONS = (
    Prediction({"workers": "2"}, 0.4, (0.3, 0.5), "because"),
    Prediction({"batch_size": "64"}, 0.8, (0.5, 1.1), "because", only_sign=True),
    Prediction({"amp": "bf16"}, None, None, "", refused="the CPU has no unit for it"),
)


def headspace() -> Headspace:
    run = made.run_of(made.as_written())
    ideal = made.faster(label="batches=kept on the device", settings={})
    compared = made.a_comparison(ideal)
    return Headspace(
        run, Experiment((compared.a, compared.b), (compared,), 20.0), 38_000.0, 13_000.0, None, 2.9, (2.8, 3.0),
        25_000.0, None, {"ideal": "faster"}, {"cold": "the system does not tell which files it holds"}, (),
    )  # fmt: skip


def views() -> dict[str, View]:
    predicted = made.faster(prediction=PREDICTIONS[0])
    return {
        "two": Compared(made.a_comparison()),
        "predicted": Compared(made.a_comparison(predicted)),
        "alike": Compared(made.a_comparison(made.alike())),
        "sweep": Compared(made.a_sweep()),
        "headspace": HeadspaceReport(headspace()),
        "predictions": Predicted("mine", PREDICTIONS),
        "refused": Predicted("mine", PREDICTIONS[2:]),
    }


EVERY = pytest.mark.parametrize("name", views())


@EVERY
def test_a_notebook_gets_html_and_text_and_no_white_slab(name: str) -> None:
    view = views()[name]
    assert view.bundle().keys() == {"text/html", "text/plain"}
    for markup in (view.fragment(), view.html()):
        assert "<img" not in markup and "data:image" not in markup


@EVERY
def test_the_picture_has_no_ground_and_no_ink(name: str) -> None:
    picture = views()[name]._picture()
    assert picture and not re.search(r"(?<![-\w])color:", picture)
    assert "#fff" not in picture.lower() and "white;" not in picture and "font-family" not in picture


@EVERY
def test_no_word_of_a_picture_can_be_cut_off(name: str) -> None:
    read = WordsInBoxes(views()[name]._picture())
    assert read.words and not read.caught


@EVERY
def test_what_the_picture_shows_is_not_shown_twice(name: str) -> None:
    """Of a comparison, climb or prediction the table is folded where the picture stands; in a text it leads."""
    view = views()[name]
    shown = [section for section in view._sections() if section.pictured]
    before, _, after = view.fragment().partition("<details")
    for section in shown:
        assert section.title not in before and section.title in after
        assert section.title.upper() in view.text()


def test_bars_are_as_long_as_the_times() -> None:
    parts = [{"data_wait": 20.0, "compute": 20.0}, {"compute": 10.0}]
    of_a, of_b = (segments(one, 40.0) for one in parts)
    assert sum(s.share for s in of_a) == pytest.approx(1) and sum(s.share for s in of_b) == pytest.approx(0.25)
    assert [s.label for s in of_a] == ["waiting for the DataLoader", "computing"]


def test_times_are_those_of_the_blocks() -> None:
    comparison = made.a_comparison()
    words = WordsInBoxes(of_two(comparison)).words
    assert "A: the cell as written" in words and "37.9 ms" in words and "13.0 ms" in words
    assert any("2.91 times as fast (2.87–2.92): faster" in word for word in words)


def test_a_sweep_has_a_row_per_setting_on_one_axis() -> None:
    words = WordsInBoxes(of_many(made.a_sweep())).words
    for setting in ("batch_size=64", "batch_size=128", "batch_size=256", "batch_size=4096"):
        assert words.count(setting) == 1
    assert words.count("1") == 1 and "Out of memory at 3.1 GiB." in words
    assert "900 MiB" in times_of_settings(made.a_sweep())


def wild(comparison: Comparison, **changes: object) -> Comparison:
    return replace(comparison, **changes)


def test_a_huge_noise_floor_stays_on_the_axis() -> None:
    shown = html_figure.factor_range(wild(made.a_comparison(), noise_floor=6.39, verdict="undecided"))
    assert min(shown.factors) == pytest.approx(1 / 7.39) and shown.colour == UNDECIDED
    assert not WordsInBoxes(of_two(wild(made.a_comparison(), noise_floor=6.39))).caught


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
    read = WordsInBoxes(of_ladder(Section("The ladder", columns, rows), [True, False]))
    assert "17.1 → 9.0 ms · 1.9 times as fast" in read.words and "not kept: out of memory" in read.words
    assert not read.caught and "the reference" not in read.words
    assert Climbed._picture is not View._picture


def test_predictions_are_on_one_axis_and_say_how_to_measure() -> None:
    view = Predicted("mine", PREDICTIONS)
    assert (
        view.headline.sentence == "Predicted, not measured: with workers=2 the cell is 2.5 times as fast (2.0 to 3.3)."
    )
    assert "%%gpuprofile --ab workers=2" in view.headline.evidence
    words = WordsInBoxes(view._picture()).words
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
