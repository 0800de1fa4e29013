"""The pictures of comparisons, climbs and predictions: what is drawn, and the words beside it."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.formatting import duration
from gpulab.tuning.bench import pair_speeds, rows_of
from gpulab.tuning.record import Comparison, Experiment
from gpulab.views import side_by_side
from gpulab.views.bars import UNDECIDED, VERDICTS
from gpulab.views.bench import factor_ranges, picture
from gpulab.views.climb import Climbed
from gpulab.views.comparison import Compared
from gpulab.views.predictions import Predicted
from gpulab.views.side_by_side import segments
from tests.support import comparisons as made
from tests.support.markup import Markup
from tests.views.every_view import PREDICTIONS, a_climb


def test_bars_are_as_long_as_the_times() -> None:
    of_a = segments({"data_wait": 0.5, "compute": 0.5}, 40.0, 40.0)
    of_b, whole = segments({"compute": 1.0}, 10.0, 40.0), segments({}, 10.0, 40.0)
    assert [sum(s.share for s in one) for one in (of_a, of_b, whole)] == pytest.approx([1, 0.25, 0.25])
    assert [s.label for s in of_a] == ["waiting for the DataLoader", "computing"]


def test_rows_and_side_by_side_have_the_times_of_the_comparison() -> None:
    """Of a step, or of a sample where that is compared; undivided where the parts are left out."""
    for b in (made.faster(), made.batch(64, 40.0, 3)):
        c = made.a_comparison(b)
        first, row = rows_of((c,))
        assert (first.step_us, row.step_us) == (c.a.us_per_step, c.b.us_per_step) and c.b.us_per_sample
        assert row.samples_per_s == pytest.approx(1e6 / c.b.us_per_sample)
        assert 1 / c.times_as_fast == pytest.approx(np.median(1 / np.array(pair_speeds(first, row))))  # type: ignore[operator]
    words = Markup(side_by_side.picture(first, row, c.a.facts, c.b.facts, row.speed)).words
    title = "Time per sample in interleaved blocks; split as in one traced run each"
    assert title in words and duration(c.b.us_per_sample) in words
    assert all(not row.shares for row in rows_of((replace(c, no_parts_reason="they disagree"),)))


def test_stored_runs_have_their_names_and_settings() -> None:
    """The first may have settings of its own, and is the baseline; nothing of it was measured in pairs."""
    a, b = made.as_written(label="before", settings={"workers": "1"}), made.faster(label="after", settings={})
    c = replace(made.a_comparison(b, a), evidence="sequential", pairs=0)
    words = Markup(picture(rows_of((c,)))).words
    assert words.index("before") < words.index("workers=1") < words.index("1×, baseline") < words.index("after")
    assert "faster, sequential runs" in words and "as written" not in words


def test_a_sweep_has_a_row_per_setting_on_one_axis() -> None:
    words = Markup(Compared(made.a_sweep())._picture()).words
    for setting in ("batch_size=64", "batch_size=128", "batch_size=256", "batch_size=4096"):
        assert words.count(setting) == 1
    assert words.count("1") == 1 and "Out of memory at 3.1 GiB" in words and "0.88 GiB" in words


def test_a_huge_noise_floor_stays_on_the_axis() -> None:
    rows = rows_of((wild(made.a_comparison(), noise_floor=6.39, verdict="undecided"),))
    _, shown = factor_ranges(rows)
    assert min(shown.factors) == pytest.approx(1 / 7.39) and shown.colour == UNDECIDED
    assert not Markup(picture(rows)).caught


def test_colours_are_those_of_the_verdict() -> None:
    slower = made.a_comparison(made.faster(blocks=made.blocks(1, 76.0)))
    found = {c.verdict: factor_ranges(rows_of((c,)))[1].colour for c in (made.a_comparison(), slower)}
    assert found == {verdict: VERDICTS[verdict] for verdict in ("faster", "slower")}


def wild(comparison: Comparison, **changes: object) -> Comparison:
    return replace(comparison, **changes)


def test_a_climb_has_a_row_per_try_each_against_the_baseline() -> None:
    """The last by the final check, which is what the headline has; a try that never ran has its words."""
    climb = a_climb()
    refused = replace(climb.rungs[0], number=4, settings={"knob_4": "on"}, comparison=None, outcome="failed")
    read = Markup(Climbed(replace(climb, rungs=(*climb.rungs, replace(refused, words="too large"))))._picture())
    for words in ("knob_1=on", "2.0×", "knob_1=on, knob_2=on", "1.5×", "knob_1=on, knob_3=on", "2.91×", "knob_4=on"):
        assert read.words.count(words) == 1, words
    assert "rung 2 of a climb, not kept: undecided" in read.words and read.words.count("best") == 1
    assert "rung 3 of a climb, kept: faster, and the loss is the same (measured 1.18–1.33×)" in read.words
    assert "rung 4 of a climb, not kept: too large" in read.words and not read.caught


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
