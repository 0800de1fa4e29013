"""The rows of a bench: what speed, step time and sums they have, against plain arithmetic on the same blocks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.tuning.bench import (
    Bench,
    Row,
    add_up,
    baseline_row,
    between,
    cost_of_row,
    pair_speeds,
    row_of,
    speed_by_blocks,
)
from gpulab.tuning.compare.blocks import compare_blocks
from gpulab.tuning.compare.headline import comparison_headline
from gpulab.tuning.record import Block, Experiment, Side, Speed
from gpulab.views.bench import factor_ranges
from tests.support.comparisons import as_written, blocks, faster, out_of_memory

BASELINE = baseline_row(Row("a"), as_written(), 0, [compare_blocks(as_written(), faster())])
RATIOS = st.floats(0.05, 20)


def row(row_id: str, ratio: float, interval: tuple[float, float] | None = None, **settings: str) -> Row:
    verdict = "undecided" if interval is None else "faster" if interval[1] < 1 else "slower"
    return Row(row_id, settings, speed=Speed(verdict, ratio, interval, 0.01, 9))  # type: ignore[arg-type]


def test_a_row_has_the_figures_of_its_comparison() -> None:
    comparison = compare_blocks(as_written(), faster())
    made = row_of(Row("b", {"workers": "2"}), comparison, BASELINE, 7)
    assert made.speed is not None and made.speed.verdict == "faster"
    assert (made.speed.ratio, made.speed.interval) == (comparison.ratio, comparison.interval)
    assert {block.turn for block in made.blocks} == {turn + 7 for turn in range(20)} and made.loss == "same"
    assert made.shares["compute"] == faster().facts.shares.share["compute"]  # type: ignore[union-attr]
    bench = Bench("x", (BASELINE, made))
    first_us = bench.step_us(BASELINE)
    assert first_us == pytest.approx(comparison.a.us_per_step) and first_us is not None and comparison.ratio
    assert bench.step_us(made) == pytest.approx(first_us * comparison.ratio)
    slow = replace(as_written(), blocks=blocks(0, 99.0))
    later = bench.put(baseline_row(BASELINE, slow, 20, [compare_blocks(slow, faster())]))
    assert [later.step_us(row) for row in later.rows] == [first_us, bench.step_us(made)], "later blocks move no time"
    assert bench.best is made and bench.next_turn == 28 and bench.of({"workers": "2"}) is made
    failed = row_of(Row("c"), compare_blocks(as_written(), out_of_memory()), BASELINE, 0)
    assert failed.failure.startswith("out of memory") and failed.speed is not None and failed.speed.ratio is None


@pytest.mark.parametrize(
    ("setups_s", "cell_steps", "said", "best"),
    [
        ((18.0, 0.02), None, "one-time cost 18.0 s, pays off after 7", True),
        ((18.0, 0.02), 100, "one-time cost 18.0 s pays off only after 7", False),
        ((0.05, 0.02), 100, "", True),
        ((None, 18.0), 100, "", True),
    ],
)
def test_what_a_row_takes_once_is_weighed(setups_s: Any, cell_steps: int | None, said: str, best: bool) -> None:
    usual = tuple(replace(block, setup_ns=10_000_000) for block in as_written().blocks)
    starts = [None if s is None else int(s * 1e9) + 10_000_000 for s in (*setups_s, *[0.02] * 30)]
    own = tuple(replace(block, setup_ns=ns) for block, ns in zip(faster().blocks, starts, strict=False))
    comparison = compare_blocks(as_written(blocks=usual), faster(blocks=own))
    first = replace(BASELINE, blocks=usual, cell_steps=cell_steps)
    made = row_of(Row("b", {"workers": "2"}), comparison, first, 0)
    bench = Bench("x", (first, made))
    cost = cost_of_row(replace(first, step_us=bench.step_us(first)), made)
    assert (cost.words if cost is not None else "").startswith(said) and bool(cost) is bool(said)
    assert (bench.best is made) is best
    if cost is not None and cost.steps and comparison.ratio and comparison.interval and comparison.a.us_per_step:
        saved_s = comparison.a.us_per_step * (1 - comparison.ratio) / 1e6
        assert cost.steps * saved_s == pytest.approx(18.0) and cost.interval is not None
        assert cost.interval[0] < cost.steps < cost.interval[1]
        headline = comparison_headline(comparison)  # whose runs have 40 steps
        assert f"cost 18.0 s pays off only after {math.ceil(cost.steps)} steps" in headline.sentence
        assert headline.level == "unknown"
        back = between(made, first)
        assert back is not None and back.setup_s == -comparison.setup_s  # type: ignore[operator]


@pytest.mark.parametrize(("cell_steps", "best"), [(100, "quick"), (1_000, "cache"), (None, "cache")])
def test_the_best_is_that_with_which_the_cell_takes_least(cell_steps: int | None, best: str) -> None:
    """146 ms per step: a cache saves most in each and takes ten seconds once, workers save less and take one."""
    first = Row("a", step_us=146e3, cell_steps=cell_steps)
    cache = Row("cache", {"cache": "on"}, speed=Speed("faster", 1 / 6.1, (0.13, 0.22), 0.02, 4, setup_s=9.91))
    quick = Row("quick", {"workers": "2"}, speed=Speed("faster", 1 / 2.2, (0.4, 0.5), 0.02, 6, setup_s=1.12))
    found = Bench("x", (first, cache, quick)).best
    assert found is not None and found.id == best


def test_more_blocks_of_a_row_narrow_its_interval() -> None:
    few, more = (blocks(1, 30.0, turns=n, noise=0.05) for n in (6, 12))
    a = blocks(0, 38.0, turns=18, noise=0.05)
    later = tuple(replace(block, turn=block.turn + 6) for block in more)
    once, again = speed_by_blocks(a, few), speed_by_blocks(a, (*few, *later))
    assert once is not None and again is not None and once.interval is not None and again.interval is not None
    assert (once.pairs, again.pairs) == (6, 18)
    assert again.interval[1] / again.interval[0] < once.interval[1] / once.interval[0]
    assert speed_by_blocks(a, ()) is None, "without a pair there is nothing to say"


def test_a_row_that_is_measured_has_points_then_an_interval() -> None:
    a, b = (blocks(arm, ms, turns=4, noise=0.2) for arm, ms in ((0, 40.0), (1, 30.0)))
    before = Bench("x", (Row("a", blocks=blocks(0, 50.0, turns=2)), Row("b", {"workers": "2"})))
    for pairs in range(1, 5):
        ran = [block for block in (*a, *b) if block.turn < pairs]
        bench = before.so_far([before.rows[1]], ran, turn=2)
        baseline, row = bench.rows
        assert row.speed is not None and (row.speed.interval is not None) is (pairs == 4)
        assert row.speed.pairs == len(pair_speeds(baseline, row)) == pairs
        assert len(baseline.blocks) == len(before.rows[0].blocks) + pairs * len([x for x in a if not x.turn])
        assert {block.turn for block in row.blocks} == set(range(2, 2 + pairs))
        shown = factor_ranges(bench.rows)[1]
        assert set(shown.points) <= set(shown.factors) or shown.interval is not None
        assert bench.step_us(row) == pytest.approx(row.speed.ratio * bench.step_us(baseline))  # type: ignore[operator]
        assert row.speed.said == ("faster" if pairs == 4 and row.speed.verdict == "faster" else "so far"), (
            "more pairs come"
        )
    assert Bench("x").so_far([], (), 0) == Bench("x")


@pytest.mark.parametrize("turns_before", [0, 1, 2, 5])
def test_the_last_live_figure_is_the_final_one(turns_before: int) -> None:
    """Two blocks of the baseline are as near to each of B's: which one is its pair must not hang on earlier rows."""
    a, b = blocks(0, 40.0, turns=9, per_turn=2, noise=0.2), blocks(1, 30.0, turns=9, noise=0.2)
    before = Bench("x", (Row("a", blocks=blocks(0, 50.0, turns=turns_before)), Row("b", {"workers": "2"})))
    live = before.so_far([before.rows[1]], (*a, *b), before.next_turn).rows[1].speed
    final = compare_blocks(as_written(blocks=a), faster(blocks=b))
    assert live is not None
    assert (live.ratio, live.interval, live.pairs) == (final.ratio, final.interval, final.pairs)


def test_another_batch_is_compared_per_sample() -> None:
    speed = speed_by_blocks(blocks(0, 40.0, batch=32, noise=0), blocks(1, 60.0, batch=64, noise=0))
    assert speed is not None and speed.unit == "sample" and speed.ratio == pytest.approx(0.75, rel=1e-6)
    baseline = Row("a", block_us=40_000, samples_per_step=32)
    wide = Row("b", {"batch_size": "64"}, speed=speed, step_us=1.0, samples_per_step=64)
    assert Bench("x", (baseline, wide)).step_us(wide) == pytest.approx(60_000, rel=1e-6)


@given(RATIOS, RATIOS, st.floats(1.001, 3), st.floats(1.001, 3))
def test_ratios_that_were_measured_apart_are_multiplied(a: float, b: float, wide_a: float, wide_b: float) -> None:
    first, then = row("a", a, (a / wide_a, a * wide_a), x="1"), row("b", b, (b / wide_b, b * wide_b), y="1")
    assert then.speed is not None
    both = then.speed.after(first.speed)
    reach = math.exp(math.sqrt(math.log(wide_a) ** 2 + math.log(wide_b) ** 2))
    assert both.ratio == pytest.approx(a * b) and both.interval == pytest.approx((a * b / reach, a * b * reach))
    there, back = between(first, then), between(then, first)
    assert there is not None and back is not None and there.ratio is not None and back.ratio is not None
    assert there.ratio == pytest.approx(b / a) and there.ratio * back.ratio == pytest.approx(1)
    assert there.interval is not None and back.interval == pytest.approx((1 / there.interval[1], 1 / there.interval[0]))
    assert between(Row("w"), then) == then.speed, "against the baseline it is the row's own"


@pytest.mark.parametrize(("together_ms", "said"), [(10.0, "as much"), (20.0, "less"), (5.0, "more")])
def test_gains_add_up_or_do_not(together_ms: float, said: str) -> None:
    """A halves the time, B halves it: 10 ms of 40 would add up."""
    rng = np.random.default_rng(5)
    drift = np.exp(rng.normal(0, 0.2, 24))  # the machine, turn by turn: it must fall out
    baseline = np.exp(rng.permutation(np.linspace(-0.03, 0.03, 24)))  # of A alone, in all three ratios: it counts once

    def arm(number: int, step_ms: float) -> tuple[Block, ...]:
        return tuple(
            Block(number, t, 4 * t + number, 10, 3, 320, int(1e7 * step_ms * drift[t] * (1 if number else baseline[t])))
            for t in range(24)
        )

    sides = [Side(str(i), {str(i): "1"}, None, arm(i, ms)) for i, ms in enumerate((40.0, 20.0, 20.0, together_ms))]
    comparisons = tuple(compare_blocks(sides[0], side) for side in sides[1:])
    total = add_up(Experiment(tuple(sides), comparisons, 1.0))
    assert total is not None and total.verdict == said
    assert total.expected == pytest.approx(0.25, rel=0.02) and total.measured == pytest.approx(
        together_ms / 40, rel=0.02
    )
    assert add_up(Experiment((sides[0], sides[1]), comparisons[:1], 1.0)) is None


def test_the_first_row_is_as_written_and_stays() -> None:
    bench = (
        Bench("x").put(row("b", 0.5, (0.4, 0.6), workers="2")).put(Row("a")).put(row("c", 0.9, (0.8, 0.95), amp="bf16"))
    )
    assert [r.id for r in bench.rows] == ["a", "b", "c"] and bench.baseline is bench.rows[0]
    assert bench.best is not None and bench.best.id == "b"
    assert [r.id for r in bench.put(replace(bench.rows[1], pinned=True)).rows] == ["a", "b", "c"]
    assert [r.id for r in bench.remove("b").rows] == ["a", "c"]
    assert bench.remove("a") is bench, "the others are measured against it"
    assert bench.remove("b").remove("c").remove("a").rows == ()
