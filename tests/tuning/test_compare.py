"""Comparisons: what may be called faster, from which pairs, and what is said beside it. The noise here is simulated."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

import gpulab
from gpulab.analysis.cores import CoreShare
from gpulab.analysis.facts import facts
from gpulab.errors import UsageError
from gpulab.formatting import duration, factor_within
from gpulab.run import Change, Float64, Missing, Phase, Samples, Series, StepFlag, Steps
from gpulab.tuning.compare.blocks import (
    block_steps,
    carries_verdict,
    compare_blocks,
    compare_runs,
    compare_sequential,
    pair_ratios,
    same_ratios,
)
from gpulab.tuning.compare.cost import spending
from gpulab.tuning.compare.differences import compare_losses, differences
from gpulab.tuning.compare.headline import (
    DISTURBED,
    NO_SINGLE_PART,
    NOT_CLEAR,
    SHORT_OF_CORES,
    because,
    comparison_headline,
    experiment_headline,
)
from gpulab.tuning.compare.parts import LABELS, ONE_RUN_EACH, _grew, most_changed, part_changes, typical_steps
from gpulab.tuning.compare.statistics import noise_floor, paired, unpaired
from gpulab.tuning.record import Block, Comparison, Experiment, PartChange, Side
from gpulab.views import wording
from gpulab.views.comparison_sections import side_by_side, unprofiled_us
from tests.support import comparisons as made

MS = 1_000_000

# statistics


def test_the_interval_of_pairs_is_their_median_with_a_bootstrap() -> None:
    ratios = np.random.default_rng(1).normal(0.8, 0.02, 20)
    found = paired(ratios)
    assert found is not None and found.interval is not None
    assert found.ratio == pytest.approx(math.exp(np.median(np.log(ratios))))
    assert found.interval[0] < 0.8 < found.interval[1] < found.interval[0] + 0.04
    assert paired(ratios) == found, "the same blocks, the same interval"
    three, one = paired(np.array([0.9, 0.91, 0.92])), paired(np.array([0.9]))
    assert three is not None and three.interval is not None and one is not None
    assert three.interval[0] < 0.9 and three.interval[1] > 0.92, "wider than all that was seen"
    assert one.interval is None and paired(np.empty(0)) is None


def _spiky(rng: np.random.Generator, count: int) -> Float64:
    return rng.normal(0, 0.01, count) + (rng.random(count) < 0.1) * rng.exponential(0.2, count)


def _starved(rng: np.random.Generator, count: int) -> Float64:
    return rng.normal(0, 0.05, count) + rng.exponential(0.5, count) * (rng.random(count) < 0.6)


def _drifting(rng: np.random.Generator, count: int) -> Float64:
    """A random walk and a ramp of 20 %."""
    return rng.normal(0, 0.01, count) + np.cumsum(rng.normal(0, 0.005, count)) + np.linspace(0, 0.2, count)


def _autocorrelated(rng: np.random.Generator, count: int, correlation: float) -> Float64:
    """AR(1) with a deviation of 3 %."""
    values = rng.normal(0, 0.03, count)
    for i in range(1, count):
        values[i] = correlation * values[i - 1] + math.sqrt(1 - correlation**2) * values[i]
    return values


def _burst(rng: np.random.Generator, count: int) -> Float64:
    """A neighbour takes 40 % of the time at a stretch: in it blocks take 1.6 times as long, unevenly."""
    first = rng.integers(0, count - 2 * count // 5 + 1)
    hit = (np.arange(count) >= first) & (np.arange(count) < first + 2 * count // 5)
    return rng.normal(0, 0.02, count) + hit * rng.normal(0.5, 0.2, count)


NOISE: dict[str, Callable[[np.random.Generator, int], Float64]] = {  # logarithms of the time of blocks
    "heavy tails": lambda rng, count: 0.01 * rng.standard_t(2, count),
    "spikes": _spiky,
    "drifting": _drifting,
    "heavy load": lambda rng, count: 0.15 * rng.standard_t(2, count),
    "starved": _starved,
    "autocorrelated": lambda rng, count: _autocorrelated(rng, count, 0.9),
    "burst": _burst,
}


def _simulated(kind: str, turns: int, effect: float, rng: np.random.Generator) -> Comparison:
    """Blocks A, A and B of each turn in random order under noise of a kind."""
    noise = NOISE[kind](rng, 3 * turns)
    a, b = list[Block](), list[Block]()
    for turn in range(turns):
        for place, arm in enumerate(rng.permutation([0, 0, 1])):
            order = 3 * turn + place
            (b if arm else a).append(_block(int(arm), turn, order, 10 * (1 + effect * arm) * math.exp(noise[order])))
    return compare_blocks(Side("baseline", {}, None, tuple(a)), Side("b", {"b": "1"}, None, tuple(b)))


@pytest.mark.parametrize(
    ("kind", "turns", "effect"),
    [(kind, turns, 0.05) for kind in ("heavy tails", "spikes", "drifting") for turns in (4, 20)]
    + [("heavy load", 10, 9.0), ("starved", 10, 9.0)],
)
def test_no_effect_gives_no_verdict_and_an_effect_is_found(kind: str, turns: int, effect: float) -> None:
    rng = np.random.default_rng(5)
    found = [_simulated(kind, turns, 0.0, rng) for _ in range(200)]
    covered = [f.interval is not None and f.interval[0] <= 1 <= f.interval[1] for f in found]
    assert np.mean(covered) >= 0.93
    said = {"faster", "slower"} if turns != 10 else {"faster", "slower", "no measurable difference"}
    assert np.mean([f.verdict in said for f in found]) <= 0.05, "on a loaded machine nothing is shown either way"
    if turns >= 10:
        slower = [_simulated(kind, turns, effect, rng).verdict for _ in range(100)]
        assert slower.count("slower") >= (90 if turns == 20 else 100)


@pytest.mark.parametrize("kind", ["autocorrelated", "burst"])
def test_noise_over_several_turns_never_shows_the_wrong_way(kind: str) -> None:
    rng = np.random.default_rng(11)
    for effect in (0.0, -0.21):
        found = [_simulated(kind, 10, effect, rng) for _ in range(300)]
        held = [f.interval is not None and f.interval[0] <= 1 + effect <= f.interval[1] for f in found]
        assert np.mean(held) >= 0.94 and "slower" not in {f.verdict for f in found if effect}
        assert effect or np.mean([int(f.verdict in ("faster", "slower")) for f in found]) <= 0.02


@pytest.mark.parametrize(("correlation", "pairs", "least"), [(0.0, 10, 0.95), (0.3, 20, 0.91), (0.3, 30, 0.92)])
def test_pairs_like_their_neighbours_make_it_wider(correlation: float, pairs: int, least: float) -> None:
    """What a neighbour does to one side alone: these pairs are worth fewer."""
    rng = np.random.default_rng(7)
    intervals = [paired(np.exp(_autocorrelated(rng, pairs, correlation))) for _ in range(600)]
    held = [e is not None and e.interval is not None and e.interval[0] <= 1 <= e.interval[1] for e in intervals]
    assert np.mean(held) >= least


def test_a_difference_that_waits_for_cores_make_is_undecided() -> None:
    """B is faster by a fifth, and another program took its core: by the wall it is slower."""
    a, b = made.blocks(0, 10.0, turns=12, per_turn=2), made.blocks(1, 12.9, turns=12)

    def told(missed: float | None) -> Comparison:
        of_b = (replace(x, own_fraction=None if missed is None else 1 - missed) for x in b)
        of_a = (replace(x, own_fraction=1.0) for x in a)
        sides = Side("baseline", {}, None, tuple(of_a)), Side("b", {"b": "1"}, None, tuple(of_b))
        assert carries_verdict(*sides, precise=False) is (missed != 0.4)
        return compare_blocks(*sides)

    assert [told(missed).verdict for missed in (None, 0.0, 0.1, 0.4)] == ["slower", "slower", "slower", "undecided"]
    assert any("other programs decide it" in note for note in told(0.4).notes)


def test_one_outlier_does_not_raise_the_noise_floor() -> None:
    """A block of A that took 50 times as long: 639 % was the floor of such a session."""
    quiet = np.exp(np.random.default_rng(2).normal(0, 0.02, 12))
    spoiled = np.append(quiet[:-1], 50.0)
    of_quiet, of_spoiled = noise_floor(quiet), noise_floor(spoiled)
    assert of_quiet is not None and of_spoiled is not None and of_spoiled < 2 * of_quiet < 0.05
    assert noise_floor(1 / quiet) == pytest.approx(of_quiet), "twice as long and half as long are alike"
    assert noise_floor(np.array([1.0])) is None and noise_floor(np.empty(0)) is None


# blocks


def _block(arm: int, turn: int, order: int, ms: float, samples: int | None = 320) -> Block:
    return Block(arm, turn, order, 10, 3, samples, int(10 * ms * MS))


def test_a_pair_is_the_nearest_block_of_a_in_the_same_turn() -> None:
    a = Side("baseline", {}, None, (_block(0, 0, 0, 10), _block(0, 0, 1, 20), _block(0, 1, 3, 10), _block(0, 1, 5, 40)))
    b = Side("b", {"b": "1"}, None, (_block(1, 0, 2, 20), _block(1, 1, 4, 20)))
    assert pair_ratios(a, b, "step").tolist() == [1.0, 0.5]  # turn 1 is a tie: the later one of A
    assert sorted(same_ratios(a, "step").tolist()) == [0.5, 4.0]  # of both turns, in turns the other way round


def test_a_turn_without_both_arms_is_no_pair() -> None:
    a = Side("baseline", {}, None, (_block(0, 0, 0, 10), _block(0, 2, 4, 10)))
    b = Side("b", {"b": "1"}, None, (_block(1, 0, 1, 5), _block(1, 1, 3, 5)))
    found = compare_blocks(a, b)
    assert found.pairs == 1 and found.ratio == pytest.approx(0.5) and found.verdict == "undecided"
    assert any("Too few blocks (1)" in note for note in found.notes)


def test_another_batch_is_compared_per_sample() -> None:
    found = made.a_comparison(made.batch(64, 60.0, 11))
    assert (found.unit, found.verdict) == ("sample", "faster")
    assert found.ratio == pytest.approx(60 / 64 * 32 / 38, rel=0.02)
    assert found.a.us_per_sample == pytest.approx(38_000 / 32, rel=0.02)
    compute, wait = (next(c for c in found.parts if c.name == name) for name in ("compute", "data_wait"))
    assert compute.b_us > compute.a_us and compute.grew is True  # 0.36 to 0.56 ms a sample
    assert wait.grew is False
    b = made.faster()
    shorter = replace(b.blocks[0], sample_count=310)
    assert made.a_comparison(replace(b, blocks=(shorter, *b.blocks[1:]))).unit == "step", "the last one of an epoch"


def test_without_a_second_a_block_neighbours_are_the_floor() -> None:
    a = made.as_written(blocks=made.blocks(0, 38.0, per_turn=1, noise=0.05))
    found = made.a_comparison(a=a)
    assert found.noise_floor is not None and 0.01 < found.noise_floor < 0.2


def test_a_cell_that_does_not_repeat_itself_is_told() -> None:
    a = made.as_written()
    first, second = (replace(x, losses=(2.0 + i, 1.0)) for i, x in enumerate(a.blocks[:2]))
    shorter = replace(a.blocks[2], step_count=7)
    told = " ".join(made.a_comparison(a=replace(a, blocks=(first, second, shorter, *a.blocks[3:]))).notes)
    assert "the loss is not the same twice" in told and "7 to 10 steps" in told
    assert not made.a_comparison().notes


# words


AS_WRITTEN, ALONE, SPARSE = made.as_written(), made.as_written(blocks=()), made.blocks(0, 38.0, turns=4, per_turn=2)
BUSY, RARE = made.as_written(blocks=made.blocks(0, 38.0, per_turn=2, noise=0.7)), made.as_written(blocks=SPARSE)
UNCOUNTED = replace(made.batch(64, 60.0, 11), blocks=made.blocks(1, 60.0, batch=None))
NOISY, FEW = made.blocks(1, 38.0, noise=0.5), made.blocks(1, 38.0, turns=4)


@pytest.mark.parametrize(
    ("a", "b", "verdict", "sentence"),
    [
        (AS_WRITTEN, made.out_of_memory(), "not comparable", "out of memory at 3.1 GiB"),
        (
            AS_WRITTEN,
            made.faster(failure="RuntimeError: odd"),
            "not comparable",
            "the baseline: RuntimeError: odd.$",
        ),
        (AS_WRITTEN, UNCOUNTED, "not comparable", "samples of a step are not known"),
        (ALONE, made.faster(blocks=()), "faster", "workers=2 gives"),
        (BUSY, made.faster(blocks=made.blocks(1, 1.9, noise=0.3)), "faster", "workers=2 gives "),  # 0.05 times the time
        (
            AS_WRITTEN,
            made.alike(),
            "no measurable difference",
            r"_last=on gives a 1\.0.*; less than 3 % counts as none\)\.$",
        ),
        (AS_WRITTEN, made.alike(blocks=NOISY), "undecided", r"speedup per step, but .* interval is 0\.\d+–1\.\d+\.$"),
        (RARE, made.alike(blocks=FEW), "undecided", "channels_last=on gives .*too few blocks ran to tell"),
    ],
)
def test_verdicts_and_their_sentences(a: Side, b: Side, verdict: str, sentence: str) -> None:
    found = made.a_comparison(b, a)
    said = comparison_headline(found).sentence
    assert found.verdict == verdict and re.search(sentence, said), said
    assert verdict == "not comparable" or said.startswith(f"{verdict.capitalize()}: ")
    if b.failure:
        assert (found.ratio, found.loss) == (None, None)
    if a is ALONE:
        assert (found.evidence, found.pairs) == ("sequential", 0)
        assert found.ratio == pytest.approx(13.2 / 38.0, rel=0.02)
    assert any("Too few blocks (4)" in note for note in found.notes) is (a is RARE)


def test_what_would_decide_is_told_where_it_is_in_reach() -> None:
    near = replace(made.a_comparison(made.alike()), verdict="undecided", ratio=0.8, interval=(0.63, 1.02))
    assert "About 25 pairs would decide it" in comparison_headline(near).evidence
    far = replace(near, ratio=0.9, interval=(0.4, 2.0))
    assert "More blocks would hardly decide it" in comparison_headline(far).evidence
    noisy = replace(near, ratio=0.9, interval=(0.85, 0.95), noise_floor=0.3)
    assert comparison_headline(noisy).sentence.endswith("but run-to-run noise is 30 % (baseline vs. itself).")


def test_a_ratio_and_its_interval_stay_apart() -> None:
    for ratio, interval, written in (
        (2.91, (2.89, 2.94), ("2.91", "2.89–2.94")),
        (0.998, (0.985, 1.011), ("1.00", "0.98–1.01")),
        (1.034, (1.031, 1.037), ("1.034", "1.031–1.037")),
        (1.6, (1.02, 2.5), ("1.60", "1.02–2.50")),
        (14.2, (12.1, 16.3), ("14", "12–16")),
    ):
        assert factor_within(ratio, interval) == written


def _swept(*sides: Side) -> Experiment:
    compared = tuple(map(made.a_comparison, sides))
    return Experiment((compared[0].a, *(c.b for c in compared)), compared, 1.0)


def test_a_sweep_in_which_nothing_is_faster() -> None:
    none = experiment_headline(_swept(made.alike(label="x=1"), made.alike(label="x=2")))
    assert none.sentence == "None of 2 settings is faster than the baseline."
    noisy = made.alike(label="x=1", blocks=made.blocks(1, 38.0, noise=0.5))
    open_ = experiment_headline(_swept(noisy, made.alike(label="x=2")))
    expected = "Undecided: none of 2 settings is faster than the baseline for certain, and x=1 may be."
    assert (open_.key, open_.sentence) == ("undecided", expected)


# parts


def test_the_parts_are_those_of_the_steps_and_sum_to_them() -> None:
    found = made.a_comparison()
    assert {c.name for c in found.parts} == {"data_wait", "compute", "optimizer", "unknown"}
    assert sum(c.a_us for c in found.parts) == pytest.approx(found.a.us_per_step)
    assert sum(c.b_us for c in found.parts) == pytest.approx(found.b.us_per_step)
    wait = next(c for c in found.parts if c.name == "data_wait")
    assert wait.grew is False and wait.a_us_per_sample == pytest.approx(wait.a_us / 32)
    assert most_changed(found.parts, "faster", per_sample=False) == wait
    assert most_changed(found.parts, "slower", per_sample=False) is None
    assert {c.grew for c in made.a_comparison(made.alike()).parts} == {None}, "within the spread nothing has changed"
    assert {key: part.label for key, part in wording.PARTS.items()} == dict(LABELS)


def test_profiled_runs_that_differ_otherwise_explain_nothing() -> None:
    """One profiled run each, of which A's met other work: 250 times as long as B's, where the blocks are alike."""
    contended = made.as_written(facts=made.facts_with(750.0, {"compute": 0.9}, seed=1))
    brief = made.faster(facts=made.facts_with(3.0, {"compute": 0.9}, seed=2), blocks=made.blocks(1, 30.0))
    found = made.a_comparison(brief, contended)
    assert found.verdict == "faster" and not found.parts and "baseline took 750 ms" in found.no_parts_reason
    trace = replace(made.faster().facts, breakdown=brief.facts.breakdown)  # type: ignore[type-var,union-attr]
    found = made.a_comparison(made.faster(facts=trace))
    assert not found.parts and "38.1 ms and 3.01 ms" in found.no_parts_reason, "its profiled steps alone differ"
    assert because(found) == "" and "shrank" not in comparison_headline(found).sentence


def test_a_part_whose_mean_and_spread_disagree_has_not_changed() -> None:
    a, b = np.array([300.0] * 14 + [3000.0]), np.full(15, 398.0)  # one slow step: the mean fell, the middle 80 % rose
    assert _grew(a, b, 900.0) is None and _grew(b, a, 900.0) is None
    assert _grew(a[:14], b, 900.0) is True and _grew(b, a[:14], 900.0) is False


@pytest.mark.parametrize(("round_steps", "grew"), [(2, False), (1, None)])
def test_batches_that_come_in_rounds_are_judged_by_rounds(round_steps: int, grew: bool | None) -> None:
    """Two workers: every other step waits for 24 ms, about as long as each step without them."""
    known = made.facts_with(24.0, {"data_wait": 0.5, "compute": 0.4}, workers=2)
    assert known.breakdown is not None
    halved = [
        replace(step, parts_ns={**step.parts_ns, "data_wait": 24 * MS * (i % 2)})
        for i, step in enumerate(known.breakdown.steps)
    ]
    turns = replace(known, breakdown=replace(known.breakdown, steps=tuple(halved)), round_steps=round_steps)
    found = made.a_comparison(made.faster(facts=turns, blocks=made.blocks(1, 24.0)))
    assert {part.name: part.grew for part in found.parts}["data_wait"] is grew


def test_a_part_that_covers_little_is_not_the_cause() -> None:
    found = made.a_comparison()  # 25 ms less, of which waiting takes 22.5
    assert because(found).startswith(" Waiting for the DataLoader shrank")
    hidden = [replace(p, grew=None) for p in found.parts if p.name != "optimizer"]
    part = PartChange("optimizer", "optimizer", 2000.0, 1500.0, grew=False)
    assert because(replace(found, parts=(part,))) == NO_SINGLE_PART
    assert because(replace(found, parts=(*hidden, part))) == NOT_CLEAR, "waiting covers it, and no step shows that"
    assert because(replace(found, parts=())) == ""


@pytest.mark.parametrize(
    ("others", "said"), [(1.2, DISTURBED), (None, SHORT_OF_CORES), (0.1, " Waiting for the DataLoader shrank")]
)
def test_a_disturbed_profiled_run_names_no_part(others: float | None, said: str) -> None:
    """Other programs' load changes any part; workers that share the cores with their own training are what it does."""
    found = made.a_comparison()
    assert found.b.facts is not None and found.b.facts.breakdown is not None
    account = found.b.facts.breakdown
    lacking = replace(account, share={**account.share, "core_wait": 0.2})
    cores = CoreShare(0.5, 0.2, 900.0, 1.8, others, 0.0, 0.3, 0.2, None, None, cores=2, quota_cores=None)
    b = replace(found.b, facts=replace(found.b.facts, breakdown=lacking, cores=cores))
    assert because(replace(found, b=b)).startswith(said)
    assert because(found).startswith(" Waiting for the DataLoader shrank")


def _retimed(steps: Steps, wall_ms: Float64) -> Steps:
    """One after the other, each of that length."""
    end = np.cumsum(wall_ms * MS).astype(np.int64)
    return replace(steps, start_ns=np.concatenate([[0], end[:-1]]), end_ns=end)


def test_time_lost_at_the_start_of_epochs_is_named() -> None:
    def with_epochs(side: Side, first_ms: float) -> Side:
        run = made.run_of(side)
        steps = _retimed(run.steps, np.where(np.arange(len(run.steps)) % 3 == 0, first_ms, 10.0))
        flags = steps.flags.copy()
        flags[::3] |= np.uint8(StepFlag.EPOCH_START)
        steps = replace(steps, flags=flags)
        assert side.facts is not None
        return replace(side, facts=replace(side.facts, run=replace(run, steps=steps)))

    a = with_epochs(made.as_written(blocks=made.blocks(0, 10.0, per_turn=2)), 10.0)
    b = with_epochs(made.alike(blocks=made.blocks(1, 30.0)), 70.0)
    assert (
        because(made.a_comparison(b, a))
        == f" The first step of each epoch grew from 10.0 ms to 70.0 ms ({ONE_RUN_EACH})."
    )
    both = made.a_comparison(b, a)
    part = PartChange(
        "compute", "computing", 1000.0, 9000.0, grew=True
    )  # 8 ms of 20: a third, and less than the starts
    assert because(replace(both, parts=(part,))).startswith(" The first step of each epoch")
    steady = with_epochs(made.alike(blocks=made.blocks(1, 30.0)), 10.0)
    assert because(made.a_comparison(steady, a)) == "", "the traced runs do not differ as the blocks do"


def test_steps_fed_from_the_buffer_are_left_out() -> None:
    for prefetch, left_out in ((1, 3), (4, 0)):  # one worker, two steps' margin: 3 or 6 of 8 profiled steps
        known = made.facts_with(38.0, made.PARTS_A, workers=1)
        assert known.run.loader is not None and known.breakdown is not None
        run = replace(known.run, loader=replace(known.run.loader, prefetch_factor=prefetch))
        kept = typical_steps(run, known.breakdown)
        profiled = [step.number for step in known.breakdown.steps if not step.flags & StepFlag.LAST]
        assert [step.number for step in kept] == profiled[left_out:]


def test_a_withheld_breakdown_has_no_parts() -> None:
    b = made.faster()
    assert b.facts is not None
    found = made.a_comparison(replace(b, facts=replace(b.facts, breakdown=None)))
    assert found.parts == () and any("step breakdowns" in note for note in found.notes)
    assert part_changes(replace(b, facts=None), b, per_sample=False) == ()


def test_unnamed_time_is_reported_where_it_covers_the_change() -> None:
    found = replace(made.a_comparison(), verdict="slower", ratio=1.2, interval=(1.19, 1.21))
    grown = [replace(p, grew=None, b_us=p.a_us) for p in found.parts if p.name != "unknown"]
    unknown = replace(found.parts[0], name="unknown", label="unknown", grew=True, a_us=1000.0, b_us=8000.0)
    told = because(replace(found, parts=(*grown, unknown)))
    change = "grew from 1.00 ms to 8.00 ms per step"
    assert told == f" Time that the trace does not name (unknown) {change} (split as in {ONE_RUN_EACH})."
    little = replace(unknown, b_us=2000.0)
    assert because(replace(found, parts=(*grown, little))) == NO_SINGLE_PART


def test_a_run_without_a_step_is_the_reason() -> None:
    b = made.faster()
    assert b.facts is not None
    none = replace(b.facts.run, steps=Steps.empty(), traced_numbers=(), timeline=None, loader=None)
    a = made.as_written()
    assert a.facts is not None
    found = compare_runs([a.facts.run, none])
    assert isinstance(found, Comparison)
    assert "no training step was found in" in comparison_headline(found).sentence
    empty = replace(
        none, missing=(Missing("steps", "the DataLoader yielded 0 batches: list has 0 items", key="empty_loader"),)
    )
    found = compare_runs([empty, empty])
    assert isinstance(found, Comparison)
    assert comparison_headline(found).sentence.endswith(": the DataLoader yielded 0 batches: list has 0 items.")


# loss


def _losses(a: tuple[float, ...], b: tuple[float, ...], *seeds: tuple[float, ...]) -> tuple[Side, Side]:
    return Side("baseline", {}, None, losses=a, seed_losses=seeds), Side("b", {"b": "1"}, None, losses=b)


FALLING, SHORT, NANS = (2.0, 1.5, 1.0), (2.0, 1.0), (math.nan, math.nan)
CURVE, OTHER = made.loss_curve(seed=0), made.loss_curve(seed=9)
SHIFTED, MOVED = (tuple(x + by for x in curve) for by, curve in ((1e-3, CURVE), (0.3, OTHER)))
SEEDS = tuple(made.loss_curve(seed=s) for s in (1, 2, 3))


@pytest.mark.parametrize(
    ("a", "b", "seeds", "said", "words"),
    [
        (FALLING, FALLING, (), "same", "Bitwise identical over 3 steps"),
        (FALLING, (2.0, 1.5 * (1 + 5e-7), 1.0), (), "same", "Equal within 1e-06"),
        (FALLING, (2.0, 1.5, 1.01), (), "seeds not run", "differ by up to 0.99 %"),
        (FALLING, (2.0, math.nan, 1.0), (), "different", "B's loss is not a number from step 2 on"),
        (FALLING, (2.0, math.inf, 1.0), (), "different", "B's loss is infinite from step 2 on"),
        (FALLING, (math.nan,) * 3, (), "different", "not a number from step 1 on"),
        (NANS, NANS, (), "not measurable", ""),
        (SHORT, (), (), "not measurable", ""),
        (CURVE, OTHER, SEEDS, "within the band", ""),
        (CURVE, MOVED, SEEDS, "outside the band", ""),
        (CURVE, SHIFTED, (CURVE, CURVE), "different", "your code sets its own seed"),  # seeds that change nothing
        (CURVE, SHIFTED, ((), (math.nan,)), "seeds not run", "was not measured"),
    ],
)
def test_losses_are_the_same_or_said_to_differ(
    a: tuple[float, ...], b: tuple[float, ...], seeds: tuple[tuple[float, ...], ...], said: str, words: str
) -> None:
    found = compare_losses(*_losses(a, b, *seeds))
    assert found is not None and found.verdict == said and words in found.words
    assert ("another training" in found.words) is (said == "outside the band")
    assert found.seeds == sum(len(seed) > 1 for seed in seeds)
    assert len(found.band) == (40 if seeds == SEEDS else 0) and all(low < high for low, high in found.band)


def test_without_losses_nothing_is_compared() -> None:
    assert compare_losses(*_losses((), ())) is None


@pytest.mark.parametrize(
    ("settings", "samples", "said"),
    [
        ({"amp": "bf16"}, 32, "within the band"),
        ({"hidden": "512"}, 32, "within the band"),
        ({"accumulate": "4"}, 32, "not comparable"),
        ({"batch_size": "64"}, 32, "not comparable"),
        ({"bs": "64"}, 64, "not comparable"),
    ],
)
def test_the_band_judges_all_but_another_batch_and_accumulation(
    settings: dict[str, str], samples: int, said: str
) -> None:
    a = made.as_written(seed_losses=tuple(made.loss_curve(seed=s) for s in (1, 2, 3)))
    b = made.alike(settings=settings, losses=made.loss_curve(seed=9), blocks=made.blocks(1, 38.0, batch=samples))
    found = compare_blocks(a, b, changes_training="it computes otherwise")
    assert found.loss is not None and found.loss.verdict == said
    assert said != "not comparable" or "it computes otherwise" in found.loss.words
    identical = compare_losses(*_losses((2.0, 1.0), (2.0, 1.0)), changes_training="another batch", other_steps=True)
    assert identical is not None and identical.verdict == "same"


# stored runs and traces


def test_the_table_of_stored_runs_has_the_times_of_the_verdict() -> None:
    """Epochs whose first step is slow: the median step of a run does not hold them, its blocks do."""
    runs = [made.run_of(side) for side in (made.as_written(), made.alike())]
    steps = _retimed(runs[1].steps, np.where(np.arange(len(runs[1].steps)) % 3 == 0, 200.0, 38.0))
    found = compare_runs([runs[0], replace(runs[1], steps=steps, timeline=None, traced_numbers=())])
    assert isinstance(found, Comparison) and found.ratio is not None
    step = side_by_side(found, None).rows[0]
    assert step.cells[0] == "a step, without the profiler"
    assert found.a.us_per_step and found.b.us_per_step
    assert found.b.us_per_step / found.a.us_per_step == pytest.approx(found.ratio)
    assert step.cells[1:] == (duration(found.a.us_per_step), duration(found.b.us_per_step))


def test_profiled_runs_show_no_other_step_in_their_table() -> None:
    runs = [made.run_of(side) for side in (made.as_written(), made.faster())]
    traced = np.full(len(runs[0].steps), Phase.TRACED, np.uint8)
    profiled = [replace(run, steps=replace(run.steps, phase=traced)) for run in runs[:1]]
    found = compare_runs([*profiled, runs[1]])
    assert isinstance(found, Comparison)
    assert side_by_side(found, None).rows[0].cells[0] == "a step, with the profiler"
    assert unprofiled_us(found.a, found) is None and unprofiled_us(found.b, found) is None


def test_the_times_of_a_table_divide_to_the_headline() -> None:
    """A machine that became twice as slow meanwhile: most of A ran before, most of B after, each pair together."""
    a = [_block(0, turn, 2 * turn, 10.0 if turn < 6 else 20.0) for turn in range(11)]
    b = [_block(1, turn, 2 * turn + 1, 10.0 if turn < 5 else 20.0) for turn in range(11)]
    drifting = compare_blocks(Side("baseline", {}, None, tuple(a)), Side("b", {"b": "1"}, None, tuple(b)))
    assert drifting.ratio == 1.0 and drifting.a.us_per_step == drifting.b.us_per_step == 10_000
    assert drifting.a.us_per_sample == drifting.b.us_per_sample
    step = side_by_side(drifting, None).rows[0].cells
    assert len(step) == 3 and step[1] == step[2]


def test_stored_runs_are_compared_by_blocks_of_their_own_steps() -> None:
    a, b = made.run_of(made.as_written()), made.run_of(made.faster())
    found = compare_runs([a, b])
    assert isinstance(found, Comparison)
    assert (found.evidence, found.pairs, found.unit, found.verdict) == ("sequential", 0, "step", "faster")
    assert found.ratio == pytest.approx(13.2 / 38.0, rel=0.02)
    assert found.noise_floor is not None and found.noise_floor < 0.05
    assert {block.step_count for block in found.a.blocks} == {block_steps(len(facts(a).selection.rows))}
    assert "sequential" in comparison_headline(found).evidence
    assert "each run's own report" in " ".join(side_by_side(found, None).lines)


@pytest.mark.parametrize(("count", "steps"), [(3, 1), (12, 2), (29, 4), (30, 5), (45, 7), (60, 10), (1000, 10)])
def test_a_run_is_cut_into_blocks_of_five_to_ten_steps(count: int, steps: int) -> None:
    assert block_steps(count) == steps


def test_a_run_that_drifts_is_not_called_faster() -> None:
    a, b = made.run_of(made.as_written()), made.run_of(made.alike())
    steps = _retimed(b.steps, b.steps.wall_ns / MS * np.linspace(0.8, 1.1, len(b.steps)))
    steps = replace(steps, data_wait_ns=steps.data_wait_ns // 2)
    found = compare_sequential(
        made.as_written(facts=facts(a)), Side("b", {}, facts(replace(b, steps=steps, timeline=None)))
    )
    assert found.noise_floor is not None and found.noise_floor > 0.1
    assert found.verdict == "undecided"


def test_more_than_two_runs_are_compared_with_the_first() -> None:
    runs = [made.run_of(side) for side in (made.as_written(), made.faster(), made.alike())]
    found = compare_runs(runs)
    assert isinstance(found, Experiment)
    assert [c.verdict for c in found.comparisons] == ["faster", "no measurable difference"]
    assert all(c.a is found.comparisons[0].a or c.a.label == found.sides[0].label for c in found.comparisons)


def test_a_run_is_not_compared_with_itself_or_nothing() -> None:
    a, b = made.run_of(made.as_written()), made.run_of(made.faster())
    for given, words in (
        ((), "needs two runs"),
        ((a,), "needs two runs"),
        ((a, a), "compared with itself: name two runs"),
        ((a, b, replace(a, outcome_detail="read again")), "compared with itself: name two runs"),
    ):
        with pytest.raises(UsageError, match=words):
            gpulab.compare(*given)


def test_runs_of_one_name_are_told_apart() -> None:
    run = made.run_of(made.faster())
    found = compare_runs([run, run])
    assert isinstance(found, Comparison) and found.a.label != found.b.label
    assert found.ratio == 1.0 and found.verdict == "no measurable difference"


def test_what_else_differs_is_listed() -> None:
    a, b = made.run_of(made.as_written()), made.run_of(made.faster())
    assert b.loader is not None
    environment = replace(
        b.environment, hostname="two", cpu="Other CPU", packages={**b.environment.packages, "torch": "2.14.0"}
    )
    b = replace(
        b,
        environment=environment,
        device=replace(b.device, name="Other CPU"),
        code=b.code + "print(1)\n",
        loader=replace(b.loader, dataset="Other", batch_size=64),
        outcome="interrupted",
    )
    a = replace(a, environment=replace(a.environment, hostname="one"))
    told = "\n".join(differences(Side("a", {}, facts(a)), Side("b", {}, facts(b)), sequential=True))
    for expected in (
        "Other device", "Other machine: one and two", "Other torch: 2.13.0 and 2.14.0", "Other dataset: Digits",
        "Other code: 1 line differs, first nothing and “print(1)”", "Other batch size of the DataLoader: 32 and 64",
        "Other number of workers of the DataLoader: 0 and 2", "b was interrupted",
    ):  # fmt: skip
        assert expected in told, expected
    assert differences(Side("a", {}, facts(a)), Side("b", {}, facts(a)), sequential=True) == ()


def test_a_knob_without_effect_and_a_shared_gpu_are_at_the_top() -> None:
    b = made.faster(
        checks=(Change("workers", "4", "0", "DataLoader option", "no effect", "2 worker processes were seen"),),
        settings={"workers": "4"},
    )
    run = made.run_of(b)
    t = np.arange(5, dtype=np.int64)
    neighbours = Series("other_gpu_processes", "processes", "other processes", "NVML", t, np.array([0, 0, 2, 1, 0.0]))
    throttled = Series("throttle_reasons", "bits", "throttle reasons", "NVML", t, np.array([4, 4, 4, 0, 0.0]))
    b = replace(b, facts=facts(replace(run, samples=Samples((neighbours, throttled)))))
    told = differences(made.as_written(), b, sequential=False)
    assert told[0] == "workers=4 had no effect: 2 worker processes were seen."
    assert "workers=2: 4 workers were asked for, 2 loaded." in told
    assert "workers=2: 2 other processes used the GPU meanwhile." in told
    assert "workers=2: the GPU was throttled (power cap)." in told


@pytest.mark.parametrize(("busy_pct", "told"), [((15, 90), False), ((90, 90), True), ((90, 15), True)])
def test_a_gpu_that_waits_lowers_its_clock_by_itself(busy_pct: tuple[int, int], told: bool) -> None:
    """As on an H100, whose clock fell to 345 MHz in a baseline that waits for data."""

    def side(clock_mhz: float, busy: float) -> Side:
        plain = made.as_written()
        readings = {"sm_clock_mhz": clock_mhz, "gpu_utilization_pct": busy}
        t = np.arange(5, dtype=np.int64)
        series = tuple(Series(name, "", name, "NVML", t, np.full(5, value)) for name, value in readings.items())
        return replace(plain, facts=facts(replace(made.run_of(plain), samples=Samples(series))))

    sentences = differences(side(345, busy_pct[0]), side(1980, busy_pct[1]), sequential=False)
    assert any(sentence.startswith("Other GPU clock: 345 and 1,980 MHz") for sentence in sentences) is told


# energy


def test_energy_and_cost_follow_from_power_and_sample_time() -> None:
    side = made.a_comparison().a
    run = made.run_of(side)
    t = np.linspace(0, run.wall_ns, 200).astype(np.int64)
    slow = replace(run.steps, start_ns=run.steps.start_ns * 5, end_ns=run.steps.end_ns * 5)
    power = Series("power_w", "W", "power", "NVML", t * 5, np.full(200, 250.0))
    run = replace(run, steps=slow, wall_ns=5 * run.wall_ns, samples=Samples((power,)), timeline=None, traced_numbers=())
    measured = replace(side, facts=facts(run), us_per_sample=1000.0)
    found = spending(measured, price_per_hour=3.6)
    assert found.device_s == pytest.approx(1000.0)
    assert found.energy_j == pytest.approx(250_000.0)
    assert found.cost == pytest.approx(1.0)
    assert spending(measured).cost is None
    unmetered = spending(side)
    assert unmetered.energy_j is None and "not metered" in unmetered.why_no_energy


def test_unpaired_resamples_both_sides() -> None:
    rng = np.random.default_rng(2)
    found = unpaired(rng.normal(10, 0.2, 12), rng.normal(8, 0.2, 12))
    few = unpaired(np.array([10.0, 10.1, 9.9]), np.array([8.0, 8.1, 7.9]))
    assert found is not None and found.interval is not None and found.interval[0] < 0.8 < found.interval[1] < 0.9
    assert few is not None and few.interval is not None and few.interval[1] < 1
    assert unpaired(np.empty(0), np.ones(3)) is None
