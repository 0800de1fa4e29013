"""Compares two sides, by interleaved blocks or by the steps of one full run of each side.

Blocks of one turn form pairs, and the ratios of the pairs give the verdict. Two full runs, one after the other, are
weaker evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec.structs import replace

from gpulab.analysis.facts import Facts, facts
from gpulab.errors import UsageError
from gpulab.run import Float64, Int64, Run
from gpulab.tuning.compare.differences import repeats
from gpulab.tuning.compare.parts import typical_steps
from gpulab.tuning.compare.statistics import Estimate, noise_floor, paired, unpaired
from gpulab.tuning.compare.verdicts import (
    as_the_pairs_say,
    comparison_of,
    unit_of,
    us,
    usable,
    with_sample_counts,
    with_times,
)
from gpulab.tuning.record import Block, Comparison, Experiment, Side, Unit
from gpulab.verdict import contradicts, is_decided, verdict

FEWEST_PAIRS = 4  # stopping at three pairs favours intervals that are too narrow by chance: they cover 93 %, not 95 %


def compare_blocks(
    a: Side,
    b: Side,
    *,
    restored: str = "",
    same_start: bool = True,
    changes_training: str = "",
    notes: Sequence[str] = (),
) -> Comparison:
    """B against A from their interleaved blocks, paired by `Block.turn`.

    A second block of A in a turn gives the noise floor (A against itself); without one, A's neighbouring turns do.
    Of several blocks of A in a turn, the one nearest to B's block is its pair, so that a drift cancels; of two equally
    near ones, the earlier in even turns and the later in odd turns. `same_start`: the state was restored before each
    run. `changes_training`: why B trains another algorithm (`Knob.changes_training`); empty if it does not. Without any
    pair the full runs are compared, and the evidence is "sequential". Fewer pairs than `FEWEST_PAIRS` have no interval.
    """
    a, b, note = with_sample_counts(a, b)
    notes = [*notes, *filter(None, [note])]
    if a.facts is not None and b.facts is not None and not _pairs(usable(a), usable(b)):
        return compare_sequential(
            a, b, restored=restored, same_start=same_start, changes_training=changes_training, notes=notes
        )
    a, b = with_times(a), with_times(b)
    unit, unfair = unit_of(a, b)
    ratios = pair_ratios(a, b, unit)
    estimate = paired(ratios)
    if estimate is not None and estimate.count < FEWEST_PAIRS:
        estimate = Estimate(estimate.ratio, None, estimate.count)
    floor = noise_floor(same_ratios(a, unit))
    if estimate is not None and not unfair:
        b = as_the_pairs_say(a, b, unit, estimate.ratio)
    return comparison_of(
        a,
        b,
        estimate,
        floor,
        "interleaved",
        pairs=len(ratios),
        restored=restored,
        same_start=same_start,
        changes_training=changes_training,
        notes=[*notes, *_repeatability(a, b)],
        own_ratio=own_ratio(a, b, unit),
    )


def carries_verdict(a: Side, b: Side, *, precise: bool) -> bool:
    """Whether the blocks so far settle the verdict: see `decide`."""
    a, b, _ = with_sample_counts(a, b)
    unit, unfair = unit_of(a, b)
    ratios = pair_ratios(a, b, unit)
    if unfair or (len(ratios) and contradicts(float(np.median(ratios)), own_ratio(a, b, unit))):
        return False
    return decide(ratios, same_ratios(a, unit), precise=precise)


def pair_ratios(a: Side, b: Side, unit: Unit) -> Float64:
    """The ratio B over A of each turn, in order."""
    return _ratios(_pairs(usable(a), usable(b)), unit)


def own_ratio(a: Side, b: Side, unit: Unit) -> float | None:
    """The median ratio of the pairs without the training thread's waits for a core; None if any wait is unknown."""
    own = [
        us(y, unit) * y.own_fraction / us(x, unit) / x.own_fraction
        for x, y in _pairs(usable(a), usable(b))
        if x.own_fraction and y.own_fraction
    ]
    return float(np.median(own)) if own else None


def same_ratios(a: Side, unit: Unit) -> Float64:
    return _ratios(_same_pairs(usable(a)), unit)


def _pairs(a: Sequence[Block], b: Sequence[Block]) -> list[tuple[Block, Block]]:
    """For each turn, the block of A and the block of B that ran nearest to each other, in this order."""
    pairs = []
    for turn in sorted({x.turn for x in a} & {x.turn for x in b}):
        in_turn = [(x, y) for x in a for y in b if x.turn == y.turn == turn]
        nearest = min(abs(x.order - y.order) for x, y in in_turn)
        close = sorted((p for p in in_turn if abs(p[0].order - p[1].order) == nearest), key=lambda p: p[0].order)
        pairs.append(close[turn % len(close)])
    return pairs


def _same_pairs(a: Sequence[Block]) -> list[tuple[Block, Block]]:
    """A against A: two blocks of one turn, else of neighbouring turns; their order alternates from pair to pair."""
    turns: dict[int, list[Block]] = {}
    for block in sorted(a, key=lambda block: block.order):
        turns.setdefault(block.turn, []).append(block)
    pairs = [(blocks[0], blocks[1]) for blocks in turns.values() if len(blocks) > 1]
    if not pairs:
        firsts = [blocks[0] for blocks in turns.values()]
        pairs = list(pairwise(firsts))
    return [pair if i % 2 else (pair[1], pair[0]) for i, pair in enumerate(pairs)]


def _ratios(pairs: Sequence[tuple[Block, Block]], unit: Unit) -> Float64:
    return np.array([us(second, unit) / us(first, unit) for first, second in pairs], np.float64)


def _repeatability(a: Side, b: Side) -> list[str]:
    """Notes for a side whose blocks differ at identical settings: a comparison assumes that they repeat."""
    notes = []
    for side in (a, b):
        runs = [block.losses for block in side.blocks if block.losses]
        if any(not repeats(runs[0], again) for again in runs[1:]):
            notes.append(f"{side.label}: the loss is not the same twice at identical settings.")
        counts = {block.step_count for block in side.blocks}
        if len(counts) > 1:
            notes.append(f"{side.label}: blocks had {min(counts)} to {max(counts)} steps at identical settings.")
    return notes


# Whether the pairs so far decide a comparison, so that it may end; checked after each turn. Pure functions.


PRECISE = 0.05  # half width of an interval, if settings are compared with each other as well

# Student's t by degrees of freedom from 3 on, two-sided: 99.8 % for a difference, 99 % for its absence. Repeated checks
# inflate errors less for an absence: the true ratio would have to lie at the very edge of the band.
_DIFFERENT = (10.21, 7.17, 5.89, 5.21, 4.79, 4.50, 4.30, 4.14, 4.02, 3.93, 3.85, 3.79, 3.73, 3.69, 3.65, 3.61)
_ALIKE = (5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17, 3.11, 3.05, 3.01, 2.98, 2.95, 2.92, 2.90, 2.88)


def decide(ratios: Float64, same: Float64, *, precise: bool = False) -> bool:
    """Whether more pairs would not change the verdict. `ratios`: B over A; `same`: A over itself.

    `precise`: the interval must also be narrow, as a choice among several settings requires.
    """
    estimate, floor = paired(ratios), noise_floor(same)
    if estimate is None or estimate.interval is None or len(ratios) < FEWEST_PAIRS:
        return False
    said = verdict(estimate.ratio, estimate.interval, floor, estimate.count)
    if not is_decided(said):
        return False
    quantiles = _ALIKE if said == "no measurable difference" else _DIFFERENT
    # of the mean of the logarithms: an outlier makes it wide, and the comparison goes on
    quantile = quantiles[min(len(ratios) - FEWEST_PAIRS, len(quantiles) - 1)]
    logs = np.log(ratios)
    middle, reach = float(logs.mean()), quantile * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    strict = math.exp(middle - reach), math.exp(middle + reach)
    if verdict(estimate.ratio, strict, floor, estimate.count) != said:
        return False
    low, high = estimate.interval
    return not precise or math.log(high / low) / 2 <= PRECISE


MOST_STEPS = 10  # of a block; definitions.md, "Honest comparison" 3: 5 to 10
FEWEST_BLOCKS = 6  # for a bootstrap; a run with fewer than 6 blocks of 5 steps has shorter blocks
UNPROFILED, PROFILED = "without the profiler", "with the profiler"


def compare_sequential(
    a: Side,
    b: Side,
    *,
    restored: str = "",
    same_start: bool = False,
    changes_training: str = "",
    notes: Sequence[str] = (),
) -> Comparison:
    """B against A from the steps of their full runs: consecutive steps form blocks, which are not paired.

    Both sides are judged by their unprofiled steps, or both by their profiled steps if one side has only those. Each
    side's time is the typical step of its own report, and the ratio is the quotient of these times; the blocks give
    the interval. The noise floor is the larger drift within a run: its second half against its first.
    """
    how = kind_of_steps(a.facts, b.facts)
    a, b = _with_blocks(a, 0, how), _with_blocks(b, 1, how)
    unit, _ = unit_of(a, b)
    in_a, in_b = (np.array([us(block, unit) for block in usable(side)], np.float64) for side in (a, b))
    drifts = [d for d in (_drift(in_a), _drift(in_b)) if d is not None]
    return comparison_of(
        a,
        b,
        _of_typical_steps(a, b, unit, unpaired(in_a, in_b)),
        max(drifts, default=None),
        "sequential",
        pairs=0,
        restored=restored,
        same_start=same_start,
        changes_training=changes_training,
        notes=[*notes, *_notes(a, b, how)],
    )


def _of_typical_steps(a: Side, b: Side, unit: Unit, of_blocks: Estimate | None) -> Estimate | None:
    """The ratio of the typical steps, with the interval of the blocks.

    If the blocks have another ratio, the interval spans both their interval and the same interval around this ratio.
    """
    of_a, of_b = (side.us_per_sample if unit == "sample" else side.us_per_step for side in (a, b))
    if of_blocks is None or not of_a or not of_b:
        return of_blocks
    ratio = of_b / of_a
    if of_blocks.interval is None:
        return Estimate(ratio, None, of_blocks.count)
    low, high = of_blocks.interval
    moved = ratio / of_blocks.ratio
    return Estimate(ratio, (min(low, low * moved), max(high, high * moved)), of_blocks.count)


def kind_of_steps(a: Facts | None, b: Facts | None) -> str:
    """The steps to compare: profiled steps are slower than unprofiled ones, so the two are never mixed."""
    both = [side for side in (a, b) if side is not None]
    return UNPROFILED if all(len(side.selection.rows) for side in both) else PROFILED


def _with_blocks(side: Side, arm: int, how: str) -> Side:
    if side.facts is None:
        return side
    figures, rows = side.facts, _rows(side.facts, how)
    side = with_times(replace(side, blocks=tuple(_blocks(figures, rows, arm))))
    step = figures.step_us if how == UNPROFILED else figures.traced_step_us
    if step is None or side.us_per_step is None or not step.median:
        return side
    samples = figures.run.steps.sample_count[rows]
    us_per_sample = step.median / float(np.median(samples)) if side.us_per_sample is not None else None
    return replace(side, us_per_step=step.median, us_per_sample=us_per_sample)


def _rows(figures: Facts, how: str) -> Int64:
    if how == UNPROFILED:
        return figures.selection.rows
    numbers: Sequence[int] = figures.run.traced_numbers
    if figures.breakdown is not None and not figures.breakdown.whole_window:
        numbers = [step.number for step in typical_steps(figures.run, figures.breakdown)]
    rows: Int64 = np.flatnonzero(np.isin(figures.run.steps.number, numbers))
    return rows


def block_steps(count: int) -> int:
    """Steps per block: ten if that makes enough blocks, else fewer; with less than 30 steps fewer than five."""
    return max(1, min(MOST_STEPS, count // FEWEST_BLOCKS))


def _blocks(figures: Facts, rows: Int64, arm: int) -> list[Block]:
    size, time_ns = block_steps(len(rows)), figures.step_times_ns
    chunks = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
    samples = [figures.run.steps.sample_count[chunk] for chunk in chunks]
    return [
        Block(
            arm=arm,
            turn=i,
            order=i,
            step_count=len(chunk),
            dropped=0,
            sample_count=int(of_chunk.sum()) if (of_chunk >= 0).all() else None,
            time_ns=int(time_ns[chunk].sum()),
        )
        for i, (chunk, of_chunk) in enumerate(zip(chunks, samples, strict=True))
    ]


def _drift(times: Float64) -> float | None:
    """How far the second half of a run is from its first, as a fraction; None with fewer than two blocks."""
    if len(times) < 2:
        return None
    half = len(times) // 2
    return math.expm1(abs(math.log(np.median(times[-half:]) / np.median(times[:half]))))


def _notes(a: Side, b: Side, how: str) -> list[str]:
    notes = [
        f"{side.label}: no training step was found that could be compared."
        for side in (a, b)
        if side.facts is not None and not usable(side)
    ]
    if how == PROFILED and not notes:
        notes.append(
            "Compared by their traced steps, which are slower than untraced ones; the first and the last are left "
            "out where enough others remain."
        )
    return notes


def compare_runs(runs: Sequence[Run], *, notes: Sequence[str] = ()) -> Comparison | Experiment:
    """Each later run against the first. Raises UsageError for fewer than two runs.

    Two runs give a Comparison, more runs an Experiment. `notes` are shown with each comparison.
    """
    if len(runs) < 2:
        raise UsageError("A comparison needs two runs: name the one to compare with first, then the other.")
    for run in runs:
        if run.origin is not None and run.origin.is_cut_short:
            raise UsageError(
                f"{run.name} cannot be compared: its file is cut short. Copy the whole file again, or record it again."
            )
    sides = [
        Side(_label(run, i, runs), dict(run.settings.knobs), facts(run), checks=run.changes)
        for i, run in enumerate(runs)
    ]
    compared = [compare_sequential(sides[0], side, notes=notes) for side in sides[1:]]
    if len(compared) == 1:
        return compared[0]
    return Experiment(
        sides=(compared[0].a, *(c.b for c in compared)),
        comparisons=tuple(compared),
        seconds=sum(run.code_wall_ns for run in runs) / 1e9,
    )


def _label(run: Run, index: int, runs: Sequence[Run]) -> str:
    """The run's name; its id if several runs have that name."""
    if sum(other.name == run.name for other in runs) == 1:
        return run.name
    alike = sum(other.id == run.id for other in runs[:index])
    return f"{run.id} ({alike + 1})" if sum(other.id == run.id for other in runs) > 1 else run.id
