"""Two arms of an experiment against each other: blocks that ran in turn become pairs, and their ratios a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from gpulab.run import Float64
from gpulab.tuning.compare.early import decide
from gpulab.tuning.compare.loss import repeats
from gpulab.tuning.compare.sequential import compare_sequential
from gpulab.tuning.compare.statistics import noise_floor, paired
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
    pair the full runs of both are compared, and the evidence is "sequential".
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
    floor = noise_floor(same_ratios(a, unit))
    if estimate is not None and not unfair:
        b = as_the_pairs_say(a, b, unit, estimate.ratio)
    findings = Findings(a, b, unit, unfair, same_start, changes_training)
    return findings.comparison(estimate, floor, "interleaved", len(ratios), restored, [*notes, *_repeatability(a, b)])


def is_decided_early(a: Side, b: Side, *, precise: bool) -> bool:
    """Whether the blocks that ran so far carry the verdict: see `early.decide`."""
    a, b, _ = counted(a, b)
    unit, unfair = chosen_unit(a, b)
    return not unfair and decide(pair_ratios(a, b, unit), same_ratios(a, unit), precise=precise)


def pair_ratios(a: Side, b: Side, unit: Unit) -> Float64:
    """B over A of each turn, in order."""
    return _ratios(_pairs(usable(a), usable(b)), unit)


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
