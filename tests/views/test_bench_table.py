"""The table of a bench: every figure of a row stands in it, no text of a user becomes markup, text and HTML agree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.analysis.operators import CostRow
from gpulab.knobs.edits import ELSEWHERE
from gpulab.tuning.bench import Bench, Prediction, Row, Sum, baseline_row, between, row_of, with_run
from gpulab.tuning.compare.blocks import compare_blocks
from gpulab.tuning.record import LossVerdict, Speed
from gpulab.views import bench as view
from gpulab.views import side_by_side
from gpulab.views.page import macros
from tests.support.comparisons import as_written, facts_with, faster, loss_curve, out_of_memory
from tests.support.markup import Markup

PAIRED = compare_blocks(as_written(), faster())
A = baseline_row(Row("a"), as_written(), 0, [PAIRED])
B = row_of(Row("b", {"workers": "2"}), PAIRED, A, 0)
LOST = row_of(Row("c", {"batch_size": "4096"}), compare_blocks(as_written(), out_of_memory()), A, 0)
UNDECIDED = Row("d", {"amp": "bf16"}, speed=Speed("undecided", 0.97, (0.9, 1.05), 0.02, 6), origin="rung 2 of a climb")
BENCH = Bench("x = 1", (A, B, LOST, UNDECIDED))
ROWS = view.ordered(BENCH)


def table(rows: Sequence[Row], marks: Sequence[str] = (), *, alive: bool = False) -> str:
    return str(macros("bench.html").table(view.table_values(rows, marks, alive=alive), alive))


def test_every_row_is_a_line_of_the_table() -> None:
    shown = Markup(table(ROWS)).text
    for words in (
        "baseline", "37.9 ms", "2.91× (2.87–2.92) faster, 20 pairs", "best", "Out of memory at 3.1 GiB",
        "rung 2 of a climb", "undecided, 6 pairs", "waiting for the DataLoader",
    ):  # fmt: skip
        assert words in shown, words
    assert "predicted" not in shown
    predicted = replace(B, prediction=Prediction(0.4, (0.3, 0.5)))
    assert "predicted" in Markup(table((A, predicted))).text
    assert shown.count("best") == 1 and "Decide it" not in shown, "a page without a kernel has no buttons"
    alive = table(ROWS, ["b", "a"], alive=True)
    assert alive.count('data-do="decide"') == 1 and alive.count('data-do="remove"') == 3
    assert (
        re.search(r'aria-selected="true"[^>]*aria-label="baseline', alive)
        and 'class="gp-mark">B</span> <b>base' in alive
    )


def test_each_verdict_on_the_losses_has_a_word_of_its_own() -> None:
    rows = [(A, replace(B, loss=verdict)) for verdict in get_args(LossVerdict)]
    shown = {re.search(r"; loss (.*)$", view.words(b, None, A)).group(1) for _, b in rows}  # type: ignore[union-attr]
    assert len(shown) == len(rows) and {"not comparable", "differs, seeds not run", "differs beyond seeds"} < shown


def test_text_and_table_say_the_same() -> None:
    for row in ROWS:
        label = view.words(row, ROWS[1], ROWS[0])
        assert label in view.text(BENCH) and f'aria-label="{label}"' in table(ROWS, alive=True)
    assert view.text(Bench("x")) == view.NOTHING and view.NOTHING in table(())


def test_a_run_of_another_time_than_its_blocks_divides_nothing() -> None:
    """The baseline's run met other work: 750 ms per step, where its blocks took 38 ms."""
    a = as_written(facts=facts_with(750.0, {"data_wait": 0.9}))
    compared = compare_blocks(a, faster())
    baseline = baseline_row(Row("a"), a, 0, [compared])
    b = row_of(Row("b", {"workers": "2"}), compared, baseline, 0)
    once = baseline_row(Row("a"), a, 0, [])
    assert view.ordered(Bench("x", (once,)))[0].shares and "750 ms" in view.words(once, None, once)
    rows = view.ordered(Bench("x", (baseline, b)))
    shown = Markup(table(rows)).words
    assert {"Step time: baseline in its blocks ÷ speedup", "37.9 ms", "750 ms in its traced run"} <= set(shown)
    assert "breakdown left out" in shown and 'data-title="step in blocks"' in table(rows)
    assert not rows[0].shares and rows[1].shares == b.run_shares != {}, "b's own run took the time of its blocks"
    sides = Markup(side_by_side.fragment(rows[0], rows[1], a.facts, faster().facts, b.speed)).text
    assert "baseline: 750 ms in its traced run." in sides and "Time per step in interleaved blocks" in sides
    detail = Markup(view.full_run_words(rows[0])).text
    assert "750 ms per step. In the table, in interleaved blocks: 37.9 ms. They were measured" in detail
    again = baseline_row(baseline, as_written(), 9, [])
    assert view.ordered(Bench("x", (again, b)))[0].shares, "its next run took the time of its blocks"
    busy = view.ordered(Bench("x", (replace(baseline, contended=True), b)))
    assert "750 ms in its traced run, under CPU contention" in view.words(busy[0], None, busy[0])


def test_pinned_rows_stand_below_the_first() -> None:
    pinned = Bench("x", (A, B, replace(UNDECIDED, pinned=True)))
    assert [row.id for row in view.ordered(pinned)] == ["a", "d", "b"]


def test_no_text_of_a_user_becomes_markup() -> None:
    nasty = "<img src=x onerror=alert(1)>"
    rows = (
        replace(A, name=nasty),
        replace(B, settings={nasty: nasty}, name=nasty, loss_words=nasty),
        replace(LOST, failure=nasty),
    )
    for html in (table(rows, alive=True), side_by_side.fragment(rows[0], rows[1], None, None, None)):
        assert "<img" not in html and "&lt;img" in html


def test_two_rows_side_by_side() -> None:
    a, b, *_ = ROWS
    html = side_by_side.fragment(a, b, as_written().facts, faster().facts, B.speed)
    shown = Markup(html).text
    for words in (
        "workers=2 is faster than the baseline: speedup 2.91× (2.87–2.92).", "A: baseline", "B: workers=2",
        "Loss over samples", "Step time over the run, B: 40 steps in", "2, took effect",
    ):  # fmt: skip
        assert words in shown, words
    assert "no longer stored" in Markup(side_by_side.fragment(a, b, None, None, B.speed)).text
    assert side_by_side.sentence(a, LOST, LOST.speed).startswith("batch_size=4096 could not be measured: out of memory")
    assert side_by_side.sentence(a, UNDECIDED, UNDECIDED.speed).startswith(
        "Undecided between amp=bf16 and the baseline"
    )


def test_a_run_twenty_times_as_long_leaves_the_other_to_be_seen() -> None:
    """Steps and device of both on one time axis, each from its own first step."""
    a, b = as_written().facts, facts_with(1.6, {"compute": 1.0}, seed=9)
    assert a is not None
    *steps, device = side_by_side.charts(replace(A, losses=()), replace(B, losses=()), a, b)
    ends_s = [chart.lines[0].x[-1] for chart in steps]
    assert {chart.x_end for chart in (*steps, device)} == {ends_s[0]} and ends_s[0] == pytest.approx(5 * ends_s[1])
    assert "40 steps, the first" in steps[0].title and "40 steps in" in steps[1].title
    series, first_ns = a.run.samples.get("cpu_pct"), a.run.steps.start_ns[0]
    assert series is not None
    t_s = (series.t_ns[series.t_ns >= first_ns] - first_ns) / 1e9
    assert device.lines[0].x[0] == pytest.approx(t_s[0]) and device.lines[0].x[-1] <= device.x_end
    shown = steps[0].data()["lines"]
    assert isinstance(shown, tuple)
    heights = np.sum([line["y"] for line in shown], axis=0)
    assert heights[0] == pytest.approx(a.run.steps.time_ns[0] / 1e6, rel=1e-3), "the parts are stacked to the step"


def test_operators_of_both_stand_by_their_difference() -> None:
    a, b = as_written().facts, faster().facts
    assert a is not None and b is not None
    loading = CostRow("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1, 3e4, 3e4, 0.8)
    a = replace(
        a, operators=(CostRow("aten::mm", 1, 500.0, 500.0, 0.1), CostRow("aten::add", 1, 9e3, 9e3, 0.1), loading)
    )
    b = replace(b, operators=(CostRow("aten::mm", 1, 700.0, 700.0, 0.1), CostRow("aten::add", 1, 1e3, 1e3, 0.1)))
    shown = " ".join(Markup(side_by_side.fragment(A, B, a, b, B.speed)).words)
    assert "aten::add 9.00 ms 1.00 ms −8.00 ms aten::mm 500 µs 700 µs +200 µs" in shown
    assert "30.0 ms" not in shown, "the bar has the DataLoader's part"
    bare = replace(b, operators=(), breakdown=None)
    assert "no traced steps in B" in Markup(side_by_side.fragment(A, B, a, bare, B.speed)).text


def test_the_edit_from_one_row_to_the_other() -> None:
    """Of the code of both, not of each against the baseline; what has no place in it stands below."""
    one = Row("b", {"workers": "2"}, cell="f(workers=2)\n", edit="diff")
    other = Row("c", {"workers": "4", "amp": "bf16"}, cell="f(workers=4)", edit=f"diff\n{ELSEWHERE}\nautocast()")
    lines = Bench("f()").edit_between(one, other).split("\n")
    assert lines[-4:] == ["-f(workers=2)", "+f(workers=4)", "# Of B, where it belongs:", "autocast()"]
    for bench, baseline in ((Bench("f()"), Row("a")), (Bench("f(workers=2)"), Row("a", code="f()"))):
        assert bench.edit_between(baseline, one).split("\n")[-2:] == ["-f()", "+f(workers=2)"]


def test_losses_of_a_long_run_end_at_its_last_sample() -> None:
    long = with_run(Row("a"), as_written(losses=loss_curve(1_000)))
    assert len(long.losses) < 1_000
    assert "A goes on to 32,000" in Markup(side_by_side.fragment(long, B, None, None, None)).text


def test_a_sum_in_words() -> None:
    said = view.sum_words(Sum(0.25, 0.5, "less"))
    assert said == "The gains do not add up: 2.0× together, 4.0× expected."


def test_a_row_per_step_and_one_per_sample_are_not_compared() -> None:
    wide = replace(UNDECIDED, settings={"batch_size": "64"}, speed=Speed("faster", 0.8, (0.7, 0.9), 0.02, 6, "sample"))
    words = side_by_side.sentence(B, wide, between(B, wide))
    assert (
        words
        == "No comparison of batch_size=64 and workers=2: workers=2 was measured per step, batch_size=64 per sample."
    )
