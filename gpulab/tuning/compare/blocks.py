"""Two arms of an experiment against each other: blocks that ran in turn become pairs, and their ratios a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from gpulab.run import Float64
from gpulab.tuning.compare.loss import repeats
from gpulab.tuning.compare.sequential import compare_sequential
from gpulab.tuning.compare.statistics import Estimate, noise_floor, paired
from gpulab.tuning.compare.verdicts import (
    Findings,
    Unit,
    as_the_pairs_say,
    chosen_unit,
    counted,
    us,
    usable,
    with_times,
)
from gpulab.tuning.record import Block, Comparison, Side
from gpulab.verdict import contradicts, is_decided, verdict

FEWEST_PAIRS = 4  # with three, the few that end have shown too narrow an interval by chance: 93 % where 95 are said


def compare_blocks(
    a: Side,
    b: Side,
    *,
    restored: str = "",
    same_start: bool = True,
    changes_training: str = "",
    notes: Sequence[str] = (),
) -> Comparison:
    """B against A from the blocks of both, which ran interleaved: `Block.turn` pairs them.

    A second block of A in a turn measures A against itself: the noise floor. Without any, A's neighbouring turns do.
    Of several blocks of A in a turn, the one that ran nearest to B's is its pair, so that a drift falls out; of two
    equally near ones by turns the earlier and the later. `same_start`: the state was put back before each run.
    `changes_training`: why B trains another algorithm (`Knob.changes_training`); empty where it does not. Without any
    pair the full runs of both are compared, and the evidence is "sequential". Fewer pairs than `FEWEST_PAIRS` have no
    interval.
    """
    a, b, note = counted(a, b)
    notes = [*notes, *filter(None, [note])]
    if a.facts is not None and b.facts is not None and not _pairs(usable(a), usable(b)):
        return compare_sequential(
            a, b, restored=restored, same_start=same_start, changes_training=changes_training, notes=notes
        )
    a, b = with_times(a), with_times(b)
    unit, unfair = chosen_unit(a, b)
    ratios = pair_ratios(a, b, unit)
    estimate = paired(ratios)
    if estimate is not None and estimate.count < FEWEST_PAIRS:
        estimate = Estimate(estimate.ratio, None, estimate.count)
    floor = noise_floor(same_ratios(a, unit))
    if estimate is not None and not unfair:
        b = as_the_pairs_say(a, b, unit, estimate.ratio)
    findings = Findings(a, b, unit, unfair, same_start, changes_training, own_ratio(a, b, unit))
    return findings.comparison(estimate, floor, "interleaved", len(ratios), restored, [*notes, *_repeatability(a, b)])


def is_decided_early(a: Side, b: Side, *, precise: bool) -> bool:
    """Whether the blocks that ran so far carry the verdict: see `early.decide`."""
    a, b, _ = counted(a, b)
    unit, unfair = chosen_unit(a, b)
    ratios = pair_ratios(a, b, unit)
    if unfair or (len(ratios) and contradicts(float(np.median(ratios)), own_ratio(a, b, unit))):
        return False
    return decide(ratios, same_ratios(a, unit), precise=precise)


def pair_ratios(a: Side, b: Side, unit: Unit) -> Float64:
    """B over A of each turn, in order."""
    return _ratios(_pairs(usable(a), usable(b)), unit)


def own_ratio(a: Side, b: Side, unit: Unit) -> float | None:
    """The median ratio of the pairs without the training thread's waits for a core; None where one is not known."""
    own = [
        us(y, unit) * y.own_fraction / us(x, unit) / x.own_fraction
        for x, y in _pairs(usable(a), usable(b))
        if x.own_fraction and y.own_fraction
    ]
    return float(np.median(own)) if own else None


def same_ratios(a: Side, unit: Unit) -> Float64:
    return _ratios(_same_pairs(usable(a)), unit)


def _pairs(a: Sequence[Block], b: Sequence[Block]) -> list[tuple[Block, Block]]:
    """Per turn the block of A and the block of B that ran nearest to each other, A's first."""
    pairs = []
    for turn in sorted({x.turn for x in a} & {x.turn for x in b}):
        in_turn = [(x, y) for x in a for y in b if x.turn == y.turn == turn]
        nearest = min(abs(x.order - y.order) for x, y in in_turn)
        close = sorted((p for p in in_turn if abs(p[0].order - p[1].order) == nearest), key=lambda p: p[0].order)
        pairs.append(close[turn % len(close)])
    return pairs


def _same_pairs(a: Sequence[Block]) -> list[tuple[Block, Block]]:
    """A against A: two blocks of one turn, else of neighbouring turns; by turns the earlier and the later one first."""
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
    """Whether a side does the same again at identical settings: what a comparison rests on."""
    notes = []
    for side in (a, b):
        runs = [block.losses for block in side.blocks if block.losses]
        if any(not repeats(runs[0], again) for again in runs[1:]):
            notes.append(f"{side.label}: the loss is not the same twice at identical settings.")
        counts = {block.step_count for block in side.blocks}
        if len(counts) > 1:
            notes.append(f"{side.label}: blocks had {min(counts)} to {max(counts)} steps at identical settings.")
    return notes


# Whether the pairs that ran so far decide a comparison, so that it may end: looked at after each turn. Pure.


PRECISE = 0.05  # half the width of an interval, of settings that are compared with each other, too

# Student's t by degrees of freedom from 3 on, two-sided: 99.8 % for a difference, 99 % for its absence, where a look
# too many does less harm: the true ratio must lie at the very edge of the band.
_DIFFERENT = (10.21, 7.17, 5.89, 5.21, 4.79, 4.50, 4.30, 4.14, 4.02, 3.93, 3.85, 3.79, 3.73, 3.69, 3.65, 3.61)
_ALIKE = (5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17, 3.11, 3.05, 3.01, 2.98, 2.95, 2.92, 2.90, 2.88)


def decide(ratios: Float64, same: Float64, *, precise: bool = False) -> bool:
    """Whether these ratios of B over A, and of A over itself, already carry the verdict that they would get now.

    `precise`: also whether the interval is narrow, as the choice among several settings needs it.
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
